"""Modules that torch.fx records as one call, as it does the modules of torch.nn."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch.fx import Proxy

Forward = TypeVar("Forward", bound=Callable[..., Any])


def one_call_in_fx(forward: Forward) -> Forward:
    """Record a module's `forward` as a call of the module where torch.fx (or torchrec.fx) traces the model that holds it.

    What a forward pass does depends on the batch (which rows it asks for, the cheapest order of products), which a graph can't say.

    Raises:
        ValueError: where the module itself is traced, which leaves no model to call it.
    """

    @functools.wraps(forward)
    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        traced = next((value for value in (*args, *kwargs.values()) if isinstance(value, Proxy)), None)
        if traced is None:
            return forward(module, *args, **kwargs)
        tracer: Any = traced.tracer
        path = tracer.path_of_module(module)
        if not path:
            raise ValueError(
                f"a {type(module).__name__} is one call to torch.fx: trace a model that holds it, not the module itself"
            )
        return tracer.create_proxy("call_module", path, args, kwargs)

    return call  # type: ignore[return-value]
