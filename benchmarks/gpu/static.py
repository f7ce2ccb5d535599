"""A model of the lookup's training step, and of FBGEMM's by the same rules, on GPUs that aren't present: nothing is measured.

Our kernels are compiled for the GPU's architecture and disassembled, and the whole step is counted on fake tensors (`counts.py`). A
kernel takes the longer of two times, its bytes at the memory's bandwidth and its instructions at the rate at which schedulers issue
them, but at least `KERNEL`; kernels follow one another, as in a CUDA graph. Load latency and uneven work are ignored, and so is the
cache, with one exception: a gradient that is read twice counts once if the second reading comes soon enough (`CACHED`).

U unique rows of L ids, N columns; a table is of order 2, its slices n1 x r and r x n2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.compiled import Compiled, compile_launch
from benchmarks.gpu.counts import Step, count_step
from benchmarks.harness.environment import describe
from benchmarks.harness.ids import draw_ids
from benchmarks.harness.measure import Settings, case_rows, chosen
from benchmarks.harness.rows import Row
from comera_rec.ops.bags.triton import CHUNK, LANES, UNROLL
from comera_rec.ops.bags.triton_updates import OWNERS
from comera_rec.ops.launch import Launch
from comera_rec.tt import TTShape

ROWS = (10131227, 2202608, 8351593, 5461306, 7046547, 286181, 142572)  # Criteo Kaggle's tables above 100,000 rows
ZIPF = 1.05
SCHEDULERS = 4  # per multiprocessor, one instruction a cycle each (CUDA C++ Programming Guide, "Compute Capability 8.x" to "10.x")
KERNEL = 2e-6  # seconds from a kernel's start to the next one's in a graph, however little it does: an assumption
ATTAINED = 0.85  # fraction of the memory's bandwidth that a kernel reaches: an assumption; large copies reach 0.9
CACHED = 0.5  # fraction of the second-level cache that holds gradients between two readings: an assumption
_OURS, _FBGEMM, _ADAGRAD = "TT", "FBGEMM", "FBGEMM, Adagrad"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU by its data sheet."""

    architecture: int
    multiprocessors: int
    hertz: float
    """Boost clock."""
    bytes_per_s: float
    cache: float
    """Bytes of the second-level cache."""


# NVIDIA's data sheets, architecture white papers and tuning guides: A100 80GB SXM, H100 SXM, H200 SXM, B200 SXM.
GPUS = {
    "A100": Gpu(architecture=80, multiprocessors=108, hertz=1.41e9, bytes_per_s=2.039e12, cache=40e6),
    "H100": Gpu(architecture=90, multiprocessors=132, hertz=1.98e9, bytes_per_s=3.35e12, cache=50e6),
    "H200": Gpu(architecture=90, multiprocessors=132, hertz=1.98e9, bytes_per_s=4.8e12, cache=50e6),
    "B200": Gpu(architecture=100, multiprocessors=148, hertz=1.965e9, bytes_per_s=8e12, cache=126e6),
}


@dataclass(frozen=True, kw_only=True)
class StaticCase:
    """Tables of Criteo's sizes on a GPU; one id per bag, drawn by Zipf's law."""

    gpu: str
    batch: int
    dim: int = 64
    rank: int = 16
    dtype: str = "float32"

    @property
    def tt_shapes(self) -> list[TTShape]:
        """Shapes of order 2, one for each table."""
        return [TTShape.for_table(rows, self.dim, tt_ranks=self.rank, order=2) for rows in ROWS]

    @property
    def compression(self) -> float:
        """Dense parameters of all tables divided by those of the TT tables."""
        return sum(ROWS) * self.dim / sum(shape.num_params for shape in self.tt_shapes)

    def shapes(self) -> dict[str, Any]:
        return {"gpu": self.gpu, "batch": self.batch, "dim": self.dim, "rank": self.rank}


def cases(quick: bool) -> list[StaticCase]:
    """The goals' batches and dims on every GPU; other ranks on one GPU."""
    if quick:
        return [StaticCase(gpu="H100", batch=2048)]
    grid = [StaticCase(gpu=gpu, batch=batch, dim=dim) for gpu in GPUS for dim in (64, 128) for batch in (16_384, 65_536)]
    return [*grid, *(StaticCase(gpu="H100", batch=16_384, rank=rank) for rank in (8, 32))]


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """What a kernel contributes to a step."""

    name: str
    kernels: int
    bytes: float
    issued: float = 0.0
    """Instructions that all its warps issue."""

    def seconds(self, gpu: Gpu) -> float:
        """Seconds that the model predicts."""
        issue = self.issued / (gpu.multiprocessors * SCHEDULERS * gpu.hertz)
        return max(self.bytes / (gpu.bytes_per_s * ATTAINED), issue, self.kernels * KERNEL)


def run(settings: Settings) -> Iterator[list[Row]]:
    """Yield a row for each provider's step and one for each of our kernels."""
    environment = describe(settings.device) | {"threads": 0}
    for case in chosen(cases(settings.quick), settings.only):
        torch.manual_seed(settings.seed)
        model, gpu = Model(case), GPUS[case.gpu]
        steps = {_OURS: model.ours(), _FBGEMM: model.fbgemm(), _ADAGRAD: model.fbgemm(row_wise=False)}
        times = {name: [1e3 * sum(kernel.seconds(gpu) for kernel in kernels)] for name, kernels in steps.items()}
        counted = {name: totals(kernels, gpu) | {"compression": case.compression} for name, kernels in steps.items()}
        where = environment | {"machine": f"a model of an {case.gpu} by its data sheet, nothing measured"}
        rows = case_rows("gpu-static", case, settings, where, "estimate", "ms", times, counted, (_FBGEMM, _ADAGRAD))
        parts = {f"{kernel.name} (kernel)": kernel for kernel in steps[_OURS] if kernel.issued}
        times = {name: [1e3 * kernel.seconds(gpu)] for name, kernel in parts.items()}
        counted = {name: model.describe(name.removesuffix(" (kernel)")) for name in parts}
        yield rows + case_rows("gpu-static", case, settings, where, "estimate", "ms", times, counted)


def totals(kernels: Sequence[Kernel], gpu: Gpu) -> dict[str, float]:
    """Kernels, MiB, and the step's time under each limit alone."""
    moved = sum(kernel.bytes for kernel in kernels)
    count = sum(kernel.kernels for kernel in kernels)
    return {
        "kernels": count,
        "mib": moved / 2**20,
        "memory ms": 1e3 * moved / (gpu.bytes_per_s * ATTAINED),
        "issue ms": 1e3 * sum(kernel.issued for kernel in kernels) / (gpu.multiprocessors * SCHEDULERS * gpu.hertz),
        "kernels ms": 1e3 * count * KERNEL,
    }


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Counts of a batch's ids, over all tables."""

    unique: int
    """Rows."""
    slices_used: tuple[int, int]
    """Leading and trailing slices that the batch uses."""
    segments: tuple[int, int]
    """Slices that each chunk of the sorted ids uses, summed over the chunks."""
    rounds: tuple[int, int]
    """Groups of ids that the segments are split into, those that lanes take at once."""
    distances: Tensor
    """[L]: how many ids programs read between an id's two turns, one for each of its slices."""


class Model:
    """One case: its counted step, compiled kernels, and drawn ids."""

    def __init__(self, case: StaticCase) -> None:
        self._case = case
        self._gpu = GPUS[case.gpu]
        self._step = _counted(case.batch, case.dim, case.rank)
        self._ids = len(ROWS) * case.batch
        shape = case.tt_shapes[0]
        self._cols = shape.col_shape[0], shape.col_shape[1]
        self._batch = _drawn(case.batch, case.dim, case.rank)

    def ours(self) -> list[Kernel]:
        """Kernels of torch's operators, and our own."""
        kernels = [Kernel(name=work.name, kernels=work.kernels, bytes=work.bytes) for work in self._step.torch]
        for name, (launch, _, compiled) in self._launches.items():
            kernels.append(Kernel(name=name, kernels=1, bytes=self._bytes(launch), issued=self._issued(launch, compiled)))
        return kernels

    def fbgemm(self, *, row_wise: bool = True) -> list[Kernel]:
        """Kernels of FBGEMM 1.8's fused forward pass and exact Adagrad, unweighted; Adagrad is row-wise or keeps a sum per number.

        They are those of `embedding_forward_split_template.cu`, `transpose_embedding_input.cu` and
        `embedding_backward_split_template.cu`; the sort is CUB's over the bits of a row's number. Ids are checked, as by default.
        """
        dim, ids, unique = self._case.dim, self._ids, self._batch.unique
        rows, bags = 4.0 * unique * dim, 4.0 * ids * dim
        state = 8.0 * unique if row_wise else 2 * rows
        passes = math.ceil(math.log2(sum(ROWS)) / 8)
        return [
            Kernel(name="bounds check", kernels=1, bytes=16.0 * ids),
            Kernel(name="forward", kernels=1, bytes=rows + bags + 16.0 * ids),
            Kernel(name="linearize", kernels=1, bytes=20.0 * ids),
            Kernel(name="sort", kernels=2 + passes, bytes=8.0 * ids + passes * 24.0 * ids),
            Kernel(name="runs and their ends", kernels=4, bytes=8.0 * ids + 24.0 * unique),
            Kernel(name="long segments and memory set to zero", kernels=4, bytes=8.0 * unique),
            Kernel(name="gradients and update", kernels=2, bytes=bags + 2 * rows + state + 8.0 * ids),
        ]

    def describe(self, name: str) -> dict[str, float]:
        """What a kernel compiles to."""
        launch, _, compiled = self._launches[name]
        shares = [loop.products / loop.size for loop in compiled.loops]
        return {
            "registers": compiled.registers, "spilled bytes": compiled.spilled, "shared bytes": compiled.shared,
            "occupancy": compiled.occupancy, "inner multiply-adds": min(shares, default=0.0),
            "bytes per id": self._bytes(launch) / self._ids, **compiled.kinds,
        }  # fmt: skip

    @cached_property
    def _launches(self) -> dict[str, tuple[Launch, dict[str, Tensor], Compiled]]:
        by_name = {}
        for launch, tensors in self._step.launches:
            name = launch.kernel.__name__.strip("_").replace("_", " ")
            name = next(key for key in (name, *(f"{name} {k}" for k in range(2, 9))) if key not in by_name)
            by_name[name] = launch, tensors, _compiled(launch, tensors, self._gpu.architecture)
        return by_name

    def _issued(self, launch: Launch, compiled: Compiled) -> float:
        """Instructions of all warps: the whole code once for each program or segment, and loops for what follows in it."""
        code, name = float(sum(compiled.instructions.values())), launch.kernel.__name__
        if name == "_pool":  # the ranks' remainders, which these ranks don't have, are counted too
            code += (self._case.rank // UNROLL.value - 1) * compiled.loops[0].size
        if name == "_sum_slices":
            issued = 0.0
            for side, loop in enumerate(compiled.loops):
                turns = 4 * 4 * self._cols[1 - side] / loop.products  # 1 where the loop over columns is unrolled
                of_round = loop.size if turns == 1 else loop.around + (turns - 1) * loop.size
                segments, rounds = self._batch.segments[side], self._batch.rounds[side]
                issued += segments * (code / 2 + (turns - 1) * loop.size) + (rounds - segments) * of_round
            return launch.grid[1] * issued
        if name == "_sum_parts":  # few chunks have a sum that extends beyond them, and few programs find owners
            code = compiled.entry * CHUNK / OWNERS
        return float(math.prod(launch.grid) * launch.num_warps * code)

    def _bytes(self, launch: Launch) -> float:
        """Bytes that a kernel reads and writes, each counted once; of slices, only those that the batch uses."""
        ids, rank, name = self._ids, self._case.rank, launch.kernel.__name__
        out, key = 4.0 * ids * self._case.dim, 2.0 if sum(self._step.slices) < 1 << 15 else 4.0
        slices_used, segments = self._batch.slices_used, self._batch.segments
        slices = [4.0 * used * cols * rank for used, cols in zip(slices_used, self._cols, strict=True)]
        later = sum(4.0 * (all_ - used) * cols * rank for all_, used, cols in zip(segments, slices_used, self._cols, strict=True))
        if name == "_split_ids":
            return ids * (8.0 + 12.0 + 2 * key)
        if name == "_pool":  # offsets, pairs, targets of ids
            return out + ids * (8.0 + 12.0 + 4.0) + sum(slices)
        if name == "_sum_slices":  # for each side: keys, order, the other slice, the target; slices; sums
            again = float((4.0 * self._case.dim * self._batch.distances > CACHED * self._gpu.cache).float().mean())
            return out * (1 + again) + 2 * ids * (key + 8.0 + 4.0 + 4.0) + 2 * sum(slices) + later
        if name == "_sum_parts":
            return later + ids * 2 * key + 8.0 * sum(slices_used) + 4.0 * sum(self._step.slices)
        if name == "_finish_diagonals":
            return 4.0 * slices_used[1] * rank + 4.0 * self._step.slices[1]
        assert name == "_finish_slices"  # sums; the slice and its state, read and written; owners; the diagonal's products
        side = launch.constants["SIDE"]
        return 5 * slices[side] + 4.0 * self._step.slices[side] + 8.0 * slices_used[side] + side * 4.0 * slices_used[side] * rank


@cache
def _counted(batch: int, dim: int, rank: int) -> Step:
    return count_step([TTShape.for_table(rows, dim, tt_ranks=rank, order=2) for rows in ROWS], batch)


@cache
def _drawn(batch: int, dim: int, rank: int) -> Batch:
    keys: tuple[list[Tensor], list[Tensor]] = ([], [])
    unique, firsts = 0, [0, 0]
    for rows in ROWS:
        shape = TTShape.for_table(rows, dim, tt_ranks=rank, order=2)
        ids, modes = draw_ids(rows, batch, ZIPF), shape.row_shape
        unique += len(ids.unique())
        for side, digits in enumerate((ids // modes[1], ids % modes[1])):
            keys[side].append(digits + firsts[side])
            firsts[side] += modes[side]
    both = [torch.cat(side_keys) for side_keys in keys]
    lanes = [LANES // min(LANES, (rank // 4) * (cols // 4)) for cols in shape.col_shape]
    slices_used, segments, rounds = zip(*map(_segments, both, lanes), strict=True)
    turns = [side_keys.argsort(stable=True).argsort() for side_keys in both]
    return Batch(
        unique=unique, slices_used=slices_used, segments=segments, rounds=rounds, distances=2 * (turns[0] - turns[1]).abs()
    )


def _segments(keys: Tensor, at_once: int) -> tuple[int, int, int]:
    """Count distinct keys, those of each chunk of the sorted keys, and the groups that the latter make."""
    keys = keys.sort().values
    of_chunks = (torch.arange(len(keys)) // CHUNK) * (keys.max() + 1) + keys
    lengths = of_chunks.unique(return_counts=True)[1]
    return len(keys.unique()), len(lengths), int(((lengths + at_once - 1) // at_once).sum())


_TYPES = {torch.float32: "*fp32", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64"}


def _compiled(launch: Launch, tensors: dict[str, Tensor], architecture: int) -> Compiled:
    types = tuple(sorted((name, _TYPES[tensor.dtype]) for name, tensor in tensors.items()))
    key = (launch.variant, types, architecture)
    if key not in _compilations:
        _compilations[key] = compile_launch(launch, dict(types), architecture)
    return _compilations[key]


_compilations: dict[tuple[Any, ...], Compiled] = {}
