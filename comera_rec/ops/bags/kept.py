"""What is made of parameters once and kept from lookup to lookup."""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Generic, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from comera_rec.ops.bags.updates import UPDATING, active_replicas, are_same, hooks_in_backward
from comera_rec.ops.derivatives import in_plain_torch

T = TypeVar("T")


class UntilChanged(Generic[T]):
    """Keeps what was made of parameters until they, their memory, or the optimizers that update them in backward change.

    Nothing is kept by tracers and transforms, in copies and in pickles. Threads may share it.
    """

    def __init__(self) -> None:
        self._kept: tuple[list[Tensor], list[Any], list[Any], T, list[Tensor]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def clear(self) -> None:
        """Keep nothing, so that the memory of parameters can be freed."""
        self._kept = None

    def get(self, parameters: list[Tensor], make: Callable[[], T]) -> T:
        """Return what `make` returned for these parameters, calling it if need be."""
        if torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or in_plain_torch():
            return make()
        if self._kept is not None:
            before, facts, handles, made, _ = self._kept
            if (
                are_same(parameters, before)
                and all(handle.id in (handle.hooks_dict_ref() or ()) for handle in handles)
                and _facts(parameters) == facts
            ):
                return made
        if any(type(parameter) is not nn.Parameter or parameter.is_meta for parameter in parameters):
            return make()
        facts, memory = _facts(parameters), [parameter.detach() for parameter in parameters]
        handles = [handle for parameter in parameters for handle, _ in hooks_in_backward(parameter)]
        made = make()
        # While their memory is referred to, no other can have its address.
        self._kept = parameters, facts, handles, made, memory
        return made


def _facts(parameters: Sequence[Tensor]) -> list[Any]:
    """Return what may change about parameters."""
    replicas = active_replicas()
    facts: list[Any] = [replicas and ref(replicas)]
    for what in _MEMORY:  # one after the other is faster
        facts += map(what, parameters)
    for attributes in map(_ATTRIBUTES, parameters):
        facts.append((attributes.get(UPDATING), *attributes.get("_in_backward_optimizers", ())) if attributes else None)
    return facts


_MEMORY: tuple[Callable[[Tensor], Any], ...] = (Tensor.data_ptr, Tensor.stride, attrgetter("shape"), attrgetter("requires_grad"))
_ATTRIBUTES: Callable[[Tensor], Any] = attrgetter("__dict__")
