"""Triton kernels that are launched with little work on the host, and launches as data, to compile them elsewhere and count them."""

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

LEAST_RANK = 8


class Kernel:
    """A kernel and the constants that it is compiled for.

    Args:
        function: under `triton.jit`. Its parameters are tensors, named *_ptr, then numbers, on none of which it specializes, then
            constants.
        num_warps: as in Triton.
        constants: in any order.
    """

    OPTIONS: ClassVar[Mapping[str, object]] = {
        "num_stages": 1, "enable_fp_fusion": True, "debug": True, "sanitize_overflow": False,
    }  # fmt: skip
    """Fusing is explicit, because Triton 3.9 warns where its default is taken, and 3.10 changes it. Debugging keeps assertions."""

    def __init__(self, function: Any, *, num_warps: int, **constants: Any) -> None:
        self.function, self.num_warps = function, num_warps
        names = function.arg_names
        self.operands = tuple(names[: len(names) - len(constants)])
        self.num_tensors = sum(name.endswith("_ptr") for name in self.operands)
        self.constants = {name: constants[name] for name in names[len(self.operands) :]}
        self._last = list(self.constants.values())
        self._compiled: dict[tuple[object, ...], Any] = {}

    def __call__(self, grid: tuple[int, ...], **operands: Any) -> None:
        """Run on the current stream of the tensors' device; within `recorded_launches`, only record the launch.

        Args:
            grid: numbers of programs.
            operands: tensors and numbers, in the order of the function's parameters.
        """
        if _recorders:
            _recorders[-1].append(Launch(self, grid, operands))
            return
        values = list(operands.values())
        tensors, numbers = values[: self.num_tensors], values[self.num_tensors :]
        device = tensors[0].get_device()
        if device >= 0 and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(grid, **operands)
            return
        # Triton finds a kernel anew in every launch, and asks the driver about each pointer, which takes tens of microseconds:
        # where nothing that a kernel is compiled for differs, the one that it found is launched again, by addresses.
        addresses = [*map(Tensor.data_ptr, tensors)]
        types, devices = map(_DTYPE, tensors), map(Tensor.get_device, tensors)
        key = (*types, *devices, *[address & 15 for address in addresses], *[number > _LARGEST for number in numbers])
        compiled = self._compiled.get(key)
        if compiled is None:
            assert tuple(operands) == self.operands, f"{self.function.__name__} takes {self.operands} in this order"
            with _wide_offsets():
                compiled = self.function[grid](**operands, **self.constants, num_warps=self.num_warps, **self.OPTIONS)
            if compiled is not None:  # not in the interpreter
                self._compiled[key] = compiled
        else:
            compiled[(*grid, 1, 1)[:3]](*addresses, *numbers, *self._last)

    @property
    def variant(self) -> tuple[object, ...]:
        """The key of the compiled kernel, together with the tensors' types."""
        return self.function.__name__, tuple(self.constants.items()), self.num_warps


@contextmanager
def _wide_offsets() -> Iterator[None]:
    """On AMD's GPUs, keep Triton from 32-bit offsets within tensors below 2 GiB: kernels go from the first table to all others."""
    if torch.version.hip is None:
        yield
        return
    amd = importlib.import_module("triton").knobs.amd
    with amd.scope():
        amd.use_buffer_ops = False
        yield


class Launch(NamedTuple):
    """A launch that was recorded."""

    kernel: Kernel
    grid: tuple[int, ...]
    operands: Mapping[str, Any]


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Collect launches without running them, to count what a step does, on fake tensors of any device."""
    _recorders.append([])
    try:
        yield _recorders[-1]
    finally:
        _recorders.pop()


_recorders: list[list[Launch]] = []
_LARGEST = 0x7FFFFFFF
_DTYPE = attrgetter("dtype")


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
