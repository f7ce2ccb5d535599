"""How a lookup's time grows with the batch, and how it falls with the skew of the ids, which makes for fewer unique rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from benchmarks.harness.measure import Settings
from benchmarks.harness.rows import Row
from benchmarks.lookup.criteo_tables import DENSE, FBGEMM, UPDATED, LookupCase, measure_lookups


def cases(quick: bool) -> list[LookupCase]:
    """Sweeps over batch sizes at one skew, and over skews at one batch size."""
    sized = partial(LookupCase, providers=(DENSE, FBGEMM, UPDATED))
    batches, middle, exponents = [1_250 << k for k in range(8)], 16_384, [0, 0.5, 0.8, 1.05, 1.2, 1.5]
    if quick:
        sized = partial(sized, rows=(300_000, 100_000, 20_000), dim=32)
        batches, middle, exponents = [256, 1024, 4096], 1024, [0, 1.05, 1.5]
    grid = [*(sized(batch=batch) for batch in batches), *(sized(batch=middle, zipf=exponent) for exponent in exponents)]
    return list(dict.fromkeys(grid))


def run(settings: Settings) -> Iterator[list[Row]]:
    """Yield the rows of every case; time only."""
    yield from measure_lookups("lookup-scaling", cases(settings.quick), replace(settings, memory=False))
