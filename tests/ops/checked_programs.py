"""Checks that Triton's interpreter doesn't make by itself, of every kernel that runs within `checked_programs`.

Programs run in random order. No two may touch the same byte if one of them writes it, each may touch only memory of live tensors,
and what `tl.multiple_of` tells the compiler must be true.
"""

import gc
import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle


class _Launch:
    """What the programs of a launch touch."""

    def __init__(self, grid: Sequence[int], order: random.Random) -> None:
        self._shape = grid
        self._programs = list(itertools.product(*map(range, grid)))
        order.shuffle(self._programs)
        self._addresses: list[np.ndarray] = []
        self._accesses: list[tuple[int, bool]] = []  # the program of each of `_addresses`, and whether it writes
        self._program, self._bounds = 0, np.zeros((0, 2), dtype=np.uint64)

    def next_program(self) -> tuple[int, ...]:
        program = self._programs.pop()
        self._program = int(np.ravel_multi_index(program, self._shape))
        return program

    def touch(self, pointers: TensorHandle, mask: TensorHandle, *, writes: bool) -> None:
        first = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        if not self._are_live(first, size):
            self._bounds = _live_memory()
            assert self._are_live(first, size), f"program {self._program} {'writes' if writes else 'reads'} beyond all tensors"
        self._addresses.append((first[:, None] + np.arange(size, dtype=np.uint64)).ravel())
        self._accesses.append((self._program, writes))

    def _are_live(self, first: np.ndarray, size: int) -> bool:
        if not len(first):
            return True
        at = np.searchsorted(self._bounds[:, 0], first, side="right") - 1
        return bool((at >= 0).all() and (first + np.uint64(size) <= self._bounds[at, 1]).all())

    def require_no_race(self) -> None:
        if not self._addresses:
            return
        addresses = np.concatenate(self._addresses)
        order = np.argsort(addresses)
        lengths = [len(each) for each in self._addresses]
        programs, writes = (np.repeat(each, lengths)[order] for each in zip(*self._accesses, strict=True))
        first = np.flatnonzero(np.diff(addresses[order], prepend=addresses.min() - 1))
        lowest, highest = (extreme.reduceat(programs, first) for extreme in (np.minimum, np.maximum))
        races = (lowest != highest) & np.logical_or.reduceat(writes, first)
        assert not races.any(), f"programs {lowest[races][0]} and {highest[races][0]} touch the same byte, and one writes it"


def _live_memory() -> np.ndarray:
    """Return the start and end of each CPU tensor's memory, in order."""
    tensors = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter) and each.device.type == "cpu"]
    storages = [each.untyped_storage() for each in tensors if each.layout == torch.strided]
    bounds = {(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages}
    return np.array(sorted(bounds), dtype=np.uint64)


@contextmanager
def checked_programs(seed: int = 0) -> Iterator[None]:
    """Check all programs that the interpreter runs; a check that fails raises `InterpreterError`."""
    order, launches, interpreted = random.Random(seed), list[_Launch](), set[int]()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    set_grid, set_program = InterpreterBuilder.set_grid_dim, InterpreterBuilder.set_grid_idx
    set_attribute, run, interpret = TensorHandle.set_attr, GridExecutor.__call__, interpreter._patch_lang

    def start(builder: InterpreterBuilder, *grid: int) -> None:
        launches[:] = [_Launch(grid, order)]
        set_grid(builder, *grid)

    def checked_load(builder: InterpreterBuilder, pointers: TensorHandle, mask: TensorHandle, *rest: Any, **how: Any) -> Any:
        launches[-1].touch(pointers, mask, writes=False)
        return load(builder, pointers, mask, *rest, **how)

    def checked_store(
        builder: InterpreterBuilder, pointers: TensorHandle, value: TensorHandle, mask: TensorHandle, *rest: Any
    ) -> Any:
        launches[-1].touch(pointers, mask, writes=True)
        return store(builder, pointers, value, mask, *rest)

    def checked_claim(handle: TensorHandle, name: str, values: Sequence[int]) -> None:
        assert name == "tt.divisibility", f"nothing checks claims of {name}"
        assert not (handle.data % np.lcm.reduce(values)).any(), f"not all of these are multiples of {values}: {handle.data.ravel()}"
        set_attribute(handle, name, values)

    def interpret_once(function: Any) -> Any:
        """Replace the language's functions in a module, but not again at every call of a function within a launch."""
        if launches and id(function.__globals__) in interpreted:
            return None
        interpreted.add(id(function.__globals__))
        return interpret(function)

    def checked_run(executor: GridExecutor, *arguments: Any, **named: Any) -> None:
        launches.clear()  # one that failed may be left
        interpreted.clear()
        run(executor, *arguments, **named)
        launches.pop().require_no_race()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "set_grid_dim", start)
        patch.setattr(InterpreterBuilder, "set_grid_idx", lambda builder, *_: set_program(builder, *launches[-1].next_program()))
        patch.setattr(InterpreterBuilder, "create_masked_load", checked_load)
        patch.setattr(InterpreterBuilder, "create_masked_store", checked_store)
        patch.setattr(TensorHandle, "set_attr", checked_claim)
        patch.setattr(GridExecutor, "__call__", checked_run)
        patch.setattr(interpreter, "_patch_lang", interpret_once)
        yield
