"""TT-SVD of large tables: the memory that it takes besides the table."""

from __future__ import annotations

import datetime
from collections.abc import Iterator

import torch

from benchmarks.harness.environment import describe
from benchmarks.harness.measure import Settings
from benchmarks.harness.memory import Prepared, memory_is_measurable, peak_extra_memory
from benchmarks.harness.rows import Row
from comera_rec import TTShape, tt_svd

RANK = 32


def prepare(rows: int, dim: int, order: int, seed: int) -> Prepared:
    """Prepare one decomposition of a random table."""
    weight = torch.empty(rows, dim)
    weight.normal_(generator=torch.Generator().manual_seed(seed))
    shape = TTShape.for_table(rows, dim, tt_ranks=RANK, order=order)

    def call(turn: int) -> object:
        return tt_svd(weight, shape)

    return {"tt_svd": call}, lambda: None


def run(settings: Settings) -> Iterator[list[Row]]:
    """Yield a row of peak memory for each order."""
    rows = 100_000 if settings.quick else 10_000_000
    environment = describe(settings.device)
    for order in (2, 3):
        if not memory_is_measurable(settings.device):
            return
        (peak,) = peak_extra_memory(prepare, rows, 64, order, settings.seed, repeats=1)["tt_svd"]
        yield [
            Row(
                op="conversion", provider="tt_svd", shapes={"rows": rows, "dim": 64, "order": order, "rank": RANK}, dtype="float32",
                pass_="forward", p20=peak, p50=peak, p80=peak, unit="MiB", samples=1, ratios={},
                counted={"table_mib": rows * 64 / 2**18}, **environment, seed=settings.seed,
                date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            )
        ]  # fmt: skip
