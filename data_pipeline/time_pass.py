"""Before pass 1, if rows are split by time in given fractions: finds the times at which validation and test begin.

Each part is represented by at most 1,024 quantiles, so memory is bounded and fractions are accurate to a thousandth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from data_pipeline.count_pass import pass_over
from data_pipeline.job import Job
from data_pipeline.parse import PartRecord
from data_pipeline.parts import Part
from data_pipeline.pool import Schedule
from data_pipeline.splits import Splitting

_QUANTILES = 1024


@dataclass(kw_only=True)
class PartTimes(PartRecord):
    """A part's times, ascending, each representing equally many rows."""

    times: tuple[float, ...]


def find_times(job: Job, schedule: Schedule) -> Splitting:
    """Return the splitting with the times at which validation and test begin.

    Raises:
        ValueError: a log is damaged, or there are more malformed lines than allowed.
    """
    records = pass_over(job, schedule, _record_times, PartTimes, folder="times", description="reading times")
    parts = [part for log_records in records for part in log_records.values() if part.rows]
    val, test = job.splitting.val_fraction, job.splitting.test_fraction
    return replace(job.splitting, val_from=_time_after(parts, 1 - val - test), test_from=_time_after(parts, 1 - test))


def _record_times(job: Job, part: Part) -> PartTimes:
    record, blocks = PartRecord(last=part.last), [np.empty(0)]
    for parsed in job.blocks(part):
        assert parsed.split_keys is not None, "`Splitting.schema_used` has been called"
        blocks.append(parsed.split_keys)
        record.add(parsed)
    times = np.sort(np.concatenate(blocks))
    if len(times) > _QUANTILES:
        times = times[((np.arange(_QUANTILES) + 0.5) / _QUANTILES * len(times)).astype(np.int64)]
    return PartTimes(**vars(record), times=tuple(times.tolist()))


def _time_after(parts: Sequence[PartTimes], share: float) -> float:
    """Return the least time with at least this share of the rows before it; if none has, the next number after all times."""
    times = np.concatenate([[0.0][: not parts], *(part.times for part in parts)])
    weights = np.concatenate([[1.0][: not parts], *(np.full(len(part.times), part.rows / len(part.times)) for part in parts)])
    order = np.argsort(times, kind="stable")
    before = np.cumsum(weights[order]) - weights[order]
    first = int(np.searchsorted(before, share * weights.sum() - 1e-6))
    return float(times[order][first] if first < len(times) else np.nextafter(times.max(), np.inf))
