"""A decorator that makes torch.fx record a module as one call, as it does for modules of torch.nn."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch.fx import Proxy

from data_pipeline.errors import UserError

Forward = TypeVar("Forward", bound=Callable[..., Any])


def one_call_in_fx(forward: Forward) -> Forward:
    """Record a module's `forward` as one call where torch.fx (or torchrec.fx) traces a model that contains the module.

    A forward pass depends on the batch (unique rows), which a graph can't express.

    Raises:
        ValueError: if the module itself is traced, so that no model contains it.
    """

    @functools.wraps(forward)
    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        traced = next((value for value in (*args, *kwargs.values()) if isinstance(value, Proxy)), None)
        if traced is None:
            return forward(module, *args, **kwargs)
        tracer: Any = traced.tracer
        path = tracer.path_of_module(module)
        if not path:
            raise UserError(
                f"torch.fx records a {type(module).__name__} as one call: trace a model that contains it, not the module itself"
            )
        return tracer.create_proxy("call_module", path, args, kwargs)

    return call  # type: ignore[return-value]
