"""TT-SVD of large tables: the memory that it takes besides the table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.harness.measure import Settings, each_case
from benchmarks.harness.memory import Prepared, peak_extra_memory
from benchmarks.harness.rows import Row
from benchmarks.harness.workload import Sizes
from comera_rec import TTShape
from comera_rec.tt import tt_svd


@dataclass(frozen=True, kw_only=True)
class ConversionCase(Sizes):
    """A table and its TT form."""

    rows: int
    dim: int = 64
    order: int
    rank: int = 32


def prepare(case: ConversionCase, seed: int) -> Prepared:
    """Prepare one decomposition of a random table."""
    weight = torch.empty(case.rows, case.dim)
    weight.normal_(generator=torch.Generator().manual_seed(seed))
    shape = TTShape.for_table(case.rows, case.dim, tt_ranks=case.rank, order=case.order)
    return {"tt_svd": lambda turn: tt_svd(weight, shape)}, lambda: None


def run(settings: Settings) -> Iterator[list[Row]]:
    """Yield a row of peak memory for each order."""
    cases = [ConversionCase(rows=100_000 if settings.quick else 10_000_000, order=order) for order in (2, 3)]
    for case, rows in each_case("conversion", cases, settings):
        peaks = peak_extra_memory(prepare, case, settings.seed, repeats=1)
        yield rows("forward", "MiB", peaks, {"tt_svd": {"table_mib": case.rows * case.dim / 2**18}})
