"""A model of the lookup's training step, and of FBGEMM's by the same rules, on GPUs that aren't present: nothing is measured.

Our kernels are compiled for the GPU's architecture and disassembled, and the whole step is counted on fake tensors (`counts.py`). A
kernel takes the longest of four times: its bytes at the memory's bandwidth, its instructions at the rate at which schedulers issue
them, its loads and stores at the rate of the first-level cache, and the longest chain of loads that wait for one another, as in the
sum of the most frequent slice; but at least `KERNEL`. Kernels follow one another, as in a CUDA graph. Other uneven work is ignored,
and so is the second-level cache, with one exception: a gradient that is read twice counts once if the second reading comes soon
enough (`CACHED`). Of FBGEMM's kernels only bytes are counted.

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

from benchmarks.gpu.compiled import Compiled, WarpWork, compile_launch
from benchmarks.gpu.counts import Step, count_step
from benchmarks.harness.environment import describe
from benchmarks.harness.ids import draw_ids
from benchmarks.harness.measure import Settings, case_rows, chosen
from benchmarks.harness.rows import Row
from comera_rec.ops.bags.triton import CHUNK, LANES, UNROLL
from comera_rec.ops.launch import Launch
from comera_rec.tt import TTShape

ROWS = (10131227, 2202608, 8351593, 5461306, 7046547, 286181, 142572)  # Criteo Kaggle's tables above 100,000 rows
ZIPF = 1.05
SCHEDULERS = 4  # per multiprocessor, one instruction a cycle each (CUDA C++ Programming Guide, "Compute Capability 8.x" to "10.x")
KERNEL = 2e-6  # seconds from a kernel's start to the next one's in a graph, however little it does: an assumption
LATENCY = 0.6e-6  # seconds that a load takes which others wait for: an assumption; second-level caches take 0.2, memory 0.4 to 0.8
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
    work: WarpWork | None = None
    """What all its warps do; None if only bytes are counted."""
    chain: float = 0.0
    """Loads that wait for one another."""

    def limits(self, gpu: Gpu) -> dict[str, float]:
        """Seconds under each limit alone."""
        work = self.work or WarpWork(0.0, 0.0)
        return {
            "memory": self.bytes / (gpu.bytes_per_s * ATTAINED),
            "issue": work.instructions / (gpu.multiprocessors * SCHEDULERS * gpu.hertz),
            "first-level cache": work.cycles / (gpu.multiprocessors * gpu.hertz),
            "chains": self.chain * LATENCY,
            "kernels": self.kernels * KERNEL,
        }

    def seconds(self, gpu: Gpu) -> float:
        """Seconds that the model predicts."""
        return max(self.limits(gpu).values())


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
        parts = {f"{kernel.name} (kernel)": kernel for kernel in steps[_OURS] if kernel.work}
        times = {name: [1e3 * kernel.seconds(gpu)] for name, kernel in parts.items()}
        counted = {name: model.describe(name.removesuffix(" (kernel)")) for name in parts}
        yield rows + case_rows("gpu-static", case, settings, where, "estimate", "ms", times, counted)


def totals(kernels: Sequence[Kernel], gpu: Gpu) -> dict[str, float]:
    """Kernels, MiB, and the step's time under each limit alone."""
    limits = [kernel.limits(gpu) for kernel in kernels]
    return {
        "kernels": sum(kernel.kernels for kernel in kernels),
        "mib": sum(kernel.bytes for kernel in kernels) / 2**20,
        **{f"{name} ms": 1e3 * sum(each[name] for each in limits) for name in limits[0]},
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
    longest: tuple[int, int]
    """Ids of the most frequent slice."""
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
            work, chain = self._work(launch, compiled), self._chain(launch)
            kernels.append(Kernel(name=name, kernels=1, bytes=self._bytes(launch), work=work, chain=chain))
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

    def _work(self, launch: Launch, compiled: Compiled) -> WarpWork:
        """The work of all warps: the whole code once for each program or segment, and loops for what follows in it."""
        code, name = compiled.work, launch.kernel.__name__
        if name == "_pool":  # the ranks' remainders, which these ranks don't have, are counted too
            code = code.plus(compiled.loops[0].body.times(self._case.rank // UNROLL.value - 1))
        if name == "_sum_slices":
            total = WarpWork(0.0, 0.0)
            for side, loop in enumerate(compiled.loops):
                turns = 4 * 4 * self._cols[1 - side] / loop.products  # 1 where the loop over columns is unrolled
                more = loop.body.times(turns - 1)
                of_round = loop.body if turns == 1 else loop.around.plus(more)
                segments, rounds = self._batch.segments[side], self._batch.rounds[side]
                total = total.plus(code.times(0.5).plus(more).times(segments)).plus(of_round.times(rounds - segments))
            return total.times(launch.grid[1])
        if name == "_sum_parts":  # a program takes one of two sides, which are seldom of the same size; most have parts to add
            columns = sum(math.ceil(cols * self._case.rank / launch.constants["BLOCK"]) for cols in self._cols)
            return code.times(0.5 * launch.grid[0] * columns * launch.num_warps)
        if name == "_finish_slices":
            code = code.times(0.5)
        return code.times(math.prod(launch.grid) * launch.num_warps)

    def _chain(self, launch: Launch) -> float:
        """Count the loads of the slowest program that wait for one another."""
        name, constants = launch.kernel.__name__, launch.constants
        if name == "_sum_parts":  # the keys around a chunk, those of the next ones, and parts in turn
            parts = max(self._batch.longest) / CHUNK
            count = min(parts, constants["GROUP"]) if constants["STEP"] == 1 else parts / constants["GROUP"]
            return 2 + math.ceil(count / constants["AT_ONCE"])
        if name == "_finish_diagonals":  # the table's numbers, then the products of its trailing slices
            return 1 + math.ceil(max(shape.row_shape[1] for shape in self._case.tt_shapes) / constants["BLOCK_S"])
        return 0.0

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
            owners = 4.0 * sum(self._step.slices)
            return out * (1 + again) + 2 * ids * (key + 8.0 + 4.0 + 4.0) + 2 * sum(slices) + later + owners
        if name == "_sum_parts":  # the first launch reads all keys
            first = launch.constants["STEP"] == 1
            return later + ids * 2 * key + 12.0 * sum(slices_used) if first else later / launch.constants["GROUP"]
        products = 4.0 * self._step.slices[1] * rank
        if name == "_finish_diagonals":
            return products
        assert name == "_finish_slices"  # sums; the slice and its state, read and written; owners; the diagonal's products
        return 5 * sum(slices) + 4.0 * sum(self._step.slices) + 8.0 * sum(slices_used) + products


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
    slices_used, segments, rounds, longest = zip(*map(_segments, both, lanes), strict=True)
    turns = [side_keys.argsort(stable=True).argsort() for side_keys in both]
    return Batch(
        unique=unique, slices_used=slices_used, segments=segments, rounds=rounds, longest=longest,
        distances=2 * (turns[0] - turns[1]).abs(),
    )  # fmt: skip


def _segments(keys: Tensor, at_once: int) -> tuple[int, int, int, int]:
    """Count distinct keys, those of each chunk of the sorted keys, the groups that the latter make, and ids of the longest."""
    keys = keys.sort().values
    of_chunks = (torch.arange(len(keys)) // CHUNK) * (keys.max() + 1) + keys
    lengths = of_chunks.unique(return_counts=True)[1]
    counts = keys.unique(return_counts=True)[1]
    return len(counts), len(lengths), int(((lengths + at_once - 1) // at_once).sum()), int(counts.max())


_TYPES = {torch.float32: "*fp32", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64"}


def _compiled(launch: Launch, tensors: dict[str, Tensor], architecture: int) -> Compiled:
    types = tuple(sorted((name, _TYPES[tensor.dtype]) for name, tensor in tensors.items()))
    key = (launch.variant, types, architecture)
    if key not in _compilations:
        _compilations[key] = compile_launch(launch, dict(types), architecture)
    return _compilations[key]


_compilations: dict[tuple[Any, ...], Compiled] = {}
