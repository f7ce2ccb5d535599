"""Shapes of one size for a table: does `TTShape.for_table` choose the fastest?

First every candidate takes a few turns, then the fastest ones take many. All of them are views of one storage, because hundreds of
tables would not fit into memory together; they train it in turns, which does not affect time.

Shapes: M rows, N embedding_dim, L ids of a batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from tqdm import tqdm

import comera_rec as cr
from benchmarks.harness.agreement import Disagreement, require_agreement
from benchmarks.harness.ids import draw_ids
from benchmarks.harness.measure import Settings, each_case
from benchmarks.harness.rows import Row
from benchmarks.harness.timing import Plan, alternate
from benchmarks.harness.workload import parameter_gradients
from benchmarks.lookup.chained import rows_of
from benchmarks.lookup.criteo_tables import EPS, LR, NUM_BATCHES, ZIPF
from comera_rec.tt import LookupCost, table_candidates

FINALISTS = 10
CHECKED_IDS = 256
FAR = 3


@dataclass(frozen=True, kw_only=True)
class ShapesCase:
    """One table, its compression, and a batch of bags of one id each, drawn by Zipf's law."""

    rows: int
    dim: int
    compression: int
    batch: int = 16_384
    zipf: float = ZIPF
    dtype: str = "float32"

    @property
    def budget(self) -> int:
        """Largest number of parameters."""
        return self.rows * self.dim // self.compression

    @property
    def candidates(self) -> list[cr.TTShape]:
        """All shapes of that size."""
        return table_candidates(self.rows, self.dim, self.budget)

    def shapes(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "dim": self.dim,
            "compression": self.compression,
            "batch": self.batch,
            "ids": f"zipf {self.zipf:g}",
        }


QUICK = (ShapesCase(rows=20_000, dim=16, compression=50, batch=1024),)
# Different from the tables in `calibrate.py`.
FULL = tuple(
    ShapesCase(rows=rows, dim=dim, compression=compression)
    for rows, dim in ((10_131_227, 64), (2_202_608, 64), (1_000_000, 128), (100_000_000, 32))
    for compression in (100, 300, 1000)
)


def run(settings: Settings) -> Iterator[list[Row]]:
    """Yield a row for each finalist of every case; a ratio is the fastest shape's time divided by this one's."""
    sweep = replace(settings.plan, warmup=0, min_rounds=2)
    for case, case_rows in each_case("shapes", QUICK if settings.quick else FULL, settings):
        tables = ShapedTables(case, settings.device, settings.seed)
        choice = cr.TTShape.for_table(case.rows, case.dim, budget_params=case.budget)
        measured = tables.time(case.candidates, sweep)
        finalists = [*dict.fromkeys([choice, *sorted(measured, key=measured.__getitem__)[:FINALISTS]])]
        for shape in finalists:
            tables.require_right(shape, gradients=True)
        samples = tables.samples(finalists, settings.plan)
        fastest = min(samples, key=lambda name: float(np.median(samples[name])))
        agreement = correlation([predicted(shape, case) for shape in measured], list(measured.values()))
        counted = {
            label(shape): {
                "params": float(shape.num_params),
                "predicted_ms": predicted(shape, case),
                "chosen": float(shape == choice),
                "candidates": float(len(measured)),
                "correlation": agreement,  # over all candidates
            }
            for shape in finalists
        }
        rows = case_rows("step", "ms", samples, counted, [fastest])
        slower = next(1 / row.ratios[fastest] for row in rows if row.counted["chosen"])
        tqdm.write(
            f"for_table chooses {label(choice)}, {slower:.2f} times the fastest of {len(measured)}; "
            f"predicted and measured times correlate by {agreement:.3f}"
        )
        yield rows


def label(shape: cr.TTShape) -> str:
    """Format a shape briefly, such as "12728x796 4x16 r101"."""
    rows, cols, ranks = ("x".join(map(str, modes)) for modes in (shape.row_shape, shape.col_shape, dict.fromkeys(shape.ranks)))
    return f"{rows} {cols} r{ranks}"


def predicted(shape: cr.TTShape, case: ShapesCase) -> float:
    """Predict the milliseconds of a step as `for_table` does, for this batch."""
    cost = LookupCost(lookups=case.batch, exponent=case.zipf)
    return cost.milliseconds(shape.row_shape, shape.col_shape, shape.ranks)


def correlation(predictions: ArrayLike, times: ArrayLike) -> float:
    """Correlate logarithms, so that a shape ten times slower doesn't outweigh the others."""
    return float(np.corrcoef(np.log(predictions), np.log(times))[0, 1])


class ShapedTables:
    """TT tables of one size, built on demand as views of one storage, with batches and the upstream gradient."""

    def __init__(self, case: ShapesCase, device: str, seed: int) -> None:
        torch.manual_seed(seed)
        self._case = case
        self._values = torch.randn(case.budget).mul_(0.1).to(device)
        self._squares = torch.ones(case.budget, device=device)
        self._batches = [draw_ids(case.rows, case.batch, case.zipf).to(device) for _ in range(NUM_BATCHES)]
        self._offsets = torch.arange(case.batch, device=device)
        self._upstream_LN = torch.randn(case.batch, case.dim).to(device)

    def time(self, shapes: Sequence[cr.TTShape], plan: Plan) -> dict[cr.TTShape, float]:
        """Check all outputs, then time shapes: shape -> milliseconds of a step.

        Times are medians, but a shape far slower than the fastest in its first turn after the warm-up gets no further turns.
        """
        for shape in shapes:
            self.require_right(shape, gradients=False)
        once = self.samples(shapes, Plan(warmup=1, min_rounds=1, max_rounds=1))
        shortest = min(milliseconds for (milliseconds,) in once.values())
        samples = once | self.samples([shape for shape in shapes if once[label(shape)][0] <= FAR * shortest], plan)
        return {shape: float(np.median(samples[label(shape)])) for shape in shapes}

    def samples(self, shapes: Sequence[cr.TTShape], plan: Plan) -> dict[str, list[float]]:
        """Time shapes in turns: label -> milliseconds of steps."""
        synchronize = torch.cuda.synchronize if self._values.is_cuda else lambda: None
        return alternate({label(shape): self._step(shape) for shape in shapes}, plan, synchronize=synchronize)

    def require_right(self, shape: cr.TTShape, *, gradients: bool) -> None:
        """Compare some rows, and optionally their gradients, with products in float64.

        Raises:
            Disagreement: if they differ.
        """
        bag, ids, upstream_LN = self._bag(shape), self._batches[0][:CHECKED_IDS], self._upstream_LN[:CHECKED_IDS]
        exact = copy.deepcopy(bag).double()
        with torch.set_grad_enabled(gradients):
            expected, output = rows_of(exact, ids), bag(ids, self._offsets[: len(ids)])
        reference, outcome = {"output": expected.detach()}, {"output": output.detach()}
        if gradients:
            expected.backward(upstream_LN.double())
            output.backward(upstream_LN)
            reference, outcome = reference | parameter_gradients(exact), outcome | parameter_gradients(bag)
        try:
            require_agreement(reference, {label(shape): outcome})
        except Disagreement as error:
            raise Disagreement(f"shapes, {self._case.shapes()}: {error}") from None

    def _step(self, shape: cr.TTShape) -> Callable[[int], None]:
        bag = self._bag(shape)
        optimizer = torch.optim.Adagrad(bag.parameters(), lr=LR, eps=EPS, fused=True)
        for parameter, squares in zip(bag.parameters(), self._views(bag, self._squares).values(), strict=True):
            optimizer.state[parameter]["sum"] = squares

        def step(turn: int) -> None:
            bag(self._batches[turn % NUM_BATCHES], self._offsets).backward(self._upstream_LN)
            optimizer.step()
            optimizer.zero_grad()

        return step

    def _bag(self, shape: cr.TTShape) -> cr.TTEmbeddingBag:
        bag = cr.TTEmbeddingBag(self._case.rows, self._case.dim, shape=shape, device="meta")
        bag.load_state_dict(self._views(bag, self._values), assign=True)
        return bag.requires_grad_()

    @staticmethod
    def _views(bag: cr.TTEmbeddingBag, storage: Tensor) -> dict[str, Tensor]:
        parameters = dict(bag.named_parameters())
        parts = storage[: sum(map(Tensor.numel, parameters.values()))].split([p.numel() for p in parameters.values()])
        return {name: part.view(p.shape) for (name, p), part in zip(parameters.items(), parts, strict=True)}
