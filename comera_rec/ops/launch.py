"""One launch of a Triton kernel as data, which serves to run it on a GPU, compile it elsewhere, and count its variants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

LEAST_RANK = 8


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A kernel, its grid, and every argument that is not a tensor."""

    kernel: Any
    """A function under `triton.jit` that specializes on none of `numbers`."""
    grid: tuple[int, ...]
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Arguments that may change from call to call without another compilation."""
    constants: Mapping[str, Any]
    """Arguments that the kernel is compiled for."""
    num_warps: int
    num_stages: int = 1

    OPTIONS: ClassVar[Mapping[str, object]] = {"enable_fp_fusion": True, "debug": True, "sanitize_overflow": False}
    """Fusing is explicit, because Triton 3.9 warns where its default is taken, and 3.10 changes it. Debugging keeps assertions."""

    def __call__(self, **tensors: Tensor) -> None:
        """Run on the current stream of the tensors' device; within `recorded_launches`, only record the launch."""
        if _recorders:
            _recorders[-1].append((self, tensors))
            return
        with torch.cuda.device_of(next(iter(tensors.values()))):
            # Triton finds a kernel anew in every launch, and asks the driver about each pointer, which takes tens of microseconds:
            # where nothing that a kernel is compiled for differs, the one that it found is launched again, by addresses.
            addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
            kinds = [(tensor.dtype, tensor.get_device(), addresses[name] % 16 == 0) for name, tensor in tensors.items()]
            key = self._compiled_for, *tensors, *kinds
            compiled = _COMPILED.get(key)
            if compiled is not None:
                arguments = {**self.numbers, **self.constants, **addresses}
                compiled[self._grid](*[arguments[name] for name in self.kernel.arg_names])
                return
            compiled = self.kernel[self.grid](
                **tensors, **self.numbers, **self.constants, **self.OPTIONS, num_warps=self.num_warps, num_stages=self.num_stages
            )
            if compiled is not None:  # not in the interpreter
                _COMPILED[key] = compiled

    @cached_property
    def _compiled_for(self) -> tuple[object, ...]:
        """What the kernel is compiled for, apart from tensors: constants, and whether numbers are of 32 bits."""
        return id(self.kernel), self.variant, tuple(number > _LARGEST for number in self.numbers.values())

    @cached_property
    def _grid(self) -> tuple[int, int, int]:
        x, y, z = (*self.grid, 1, 1)[:3]
        return x, y, z

    @property
    def variant(self) -> tuple[object, ...]:
        """The key of the compiled kernel, together with the tensors' types."""
        return self.kernel.__name__, tuple(sorted(self.constants.items())), self.num_warps, self.num_stages


@contextmanager
def recorded_launches() -> Iterator[list[tuple[Launch, Mapping[str, Tensor]]]]:
    """Collect launches and their tensors without running them, to count what a step does, on fake tensors of any device."""
    _recorders.append([])
    try:
        yield _recorders[-1]
    finally:
        _recorders.pop()


_recorders: list[list[tuple[Launch, Mapping[str, Tensor]]]] = []
_COMPILED: dict[tuple[object, ...], Any] = {}
_LARGEST = 0x7FFFFFFF


def rank_bucket(rank: int) -> int:
    """Return the size to which GPU kernels pad a TT rank: a power of two, at least 8, so that truncation seldom needs new kernels.

    Padding is zeros, which change no product.
    """
    return max(LEAST_RANK, 1 << (rank - 1).bit_length())


def ceil_div(size: int, part: int) -> int:
    """Return how many parts cover a size."""
    return -(-size // part)


def block(size: int, largest: int) -> int:
    """Return the smallest power of two that covers a size, or the largest allowed."""
    return min(1 << max(size - 1, 0).bit_length(), largest)
