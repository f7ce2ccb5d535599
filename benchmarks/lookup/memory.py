"""Peak memory of training one huge table as a TT table, including cores, gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

import comera_rec as cr
from benchmarks.harness.ids import draw_ids
from benchmarks.harness.measure import Settings, each_case
from benchmarks.harness.memory import Prepared, peak_extra_memory
from benchmarks.harness.rows import Row
from benchmarks.lookup.criteo_tables import ZIPF


@dataclass(frozen=True, kw_only=True)
class TableCase:
    """One table, and a batch of bags of one id each, drawn by Zipf's law; exponent 0 is uniform."""

    rows: int = 100_000_000
    dim: int = 32
    order: int
    rank: int = 32
    batch: int = 20_000
    zipf: float
    dtype: str = "float32"

    @property
    def tt_shape(self) -> cr.TTShape:
        """Modes and ranks of the table."""
        return cr.TTShape.for_table(self.rows, self.dim, tt_ranks=self.rank, order=self.order)

    def shapes(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "dim": self.dim,
            "order": self.order,
            "rank": self.rank,
            "batch": self.batch,
            "ids": f"zipf {self.zipf:g}" if self.zipf else "uniform",
        }


def cases(quick: bool) -> list[TableCase]:
    """Every order, with ids as skewed as in logs and with uniform ids."""
    full = [TableCase(order=order, zipf=zipf) for order in (2, 3, 4) for zipf in (ZIPF, 0)]
    return [replace(case, rows=1_000_000, batch=2_000) for case in full] if quick else full


def run(settings: Settings) -> Iterator[list[Row]]:
    """Yield one row per case: how much building a table and its optimizer and taking one step raise a process's peak."""
    for case, rows in each_case("lookup-memory", cases(settings.quick), settings):
        peaks = peak_extra_memory(prepare_training, case, settings.device, settings.seed, device=settings.device)
        counted = {"params": float(case.tt_shape.num_params), "dense_mib": case.rows * case.dim * 4 / 2**20}
        yield rows("step", "MiB", {"TTEmbeddingBag": peaks["step"]}, {"TTEmbeddingBag": counted})


def prepare_training(case: TableCase, device: str, seed: int) -> Prepared:
    """Return a call that builds the table and trains one step, after warming up kernels with a tiny table."""
    torch.manual_seed(seed)
    offsets = torch.arange(case.batch, device=device)
    upstream_BN = torch.randn(case.batch, case.dim).to(device)

    def train(case: TableCase, ids: torch.Tensor) -> object:
        bag = cr.TTEmbeddingBag(case.rows, case.dim, shape=case.tt_shape, device=device)
        optimizer = torch.optim.Adagrad(bag.parameters(), fused=True)
        bag(ids, offsets).backward(upstream_BN)
        optimizer.step()
        return bag, optimizer

    ids = draw_ids(case.rows, case.batch, case.zipf).to(device)
    train(replace(case, rows=1_000), ids % 1_000)
    return {"step": lambda turn: train(case, ids)}, lambda: None
