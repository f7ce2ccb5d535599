"""Before pass 1, where splits are shares of the rows by time: which times these shares begin at.

Of each part 1,024 quantiles are kept, so that memory is bounded and shares hold within a thousandth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from data_pipeline.count_pass import pass_over
from data_pipeline.job import Job, part_name
from data_pipeline.parse import REASONS_KEPT
from data_pipeline.parts import Part
from data_pipeline.pool import Schedule
from data_pipeline.splits import Splitting

_QUANTILES = 1024


@dataclass(frozen=True, kw_only=True)
class PartTimes:
    """A part's times, ascending; each stands for equally many rows. Other members as in `PartRecord`."""

    lines: int
    rows: int
    rejected: int
    reasons: tuple[tuple[int, str], ...]
    last: bool
    times: tuple[float, ...]


def find_times(job: Job, schedule: Schedule) -> Splitting:
    """The splitting with the times at which validation and test begin.

    Raises:
        ValueError: a log is damaged, or there are more malformed lines than allowed.
    """
    records = pass_over(job, schedule, _note_times, PartTimes, folder="times", description="reading times")
    parts = [part for of_log in records for part in of_log.values() if part.rows]
    val, test = job.splitting.val, job.splitting.test
    return replace(job.splitting, val_from=_time_after(parts, 1 - val - test), test_from=_time_after(parts, 1 - test))


def _note_times(job: Job, part: Part, detail: None) -> tuple[int, int, PartTimes]:
    name = f"times/{part_name(part.log, part.number)}"
    record = job.work.load(name, PartTimes)
    if record is None:
        blocks, reasons = [np.empty(0)], list[tuple[int, str]]()
        lines = 0
        for parsed in job.blocks(part):
            assert parsed.split_keys is not None, "`Splitting.check_column` has been called"
            blocks.append(parsed.split_keys)
            reasons += parsed.reasons[: REASONS_KEPT - len(reasons)]
            lines += parsed.lines
        times = np.sort(np.concatenate(blocks))
        rows = len(times)
        if len(times) > _QUANTILES:
            times = times[((np.arange(_QUANTILES) + 0.5) / _QUANTILES * len(times)).astype(np.int64)]
        record = PartTimes(
            lines=lines,
            rows=rows,
            rejected=lines - rows,
            reasons=tuple(reasons),
            last=part.last,
            times=tuple(times.tolist()),
        )
        job.work.save(name, record)
    return part.log, part.number, record


def _time_after(parts: Sequence[PartTimes], share: float) -> float:
    """The least time such that this share of the rows came before; the next number after all times, if it takes all."""
    times = np.concatenate([[0.0][: not parts], *(part.times for part in parts)])
    weights = np.concatenate([[1.0][: not parts], *(np.full(len(part.times), part.rows / len(part.times)) for part in parts)])
    order = np.argsort(times, kind="stable")
    before = np.cumsum(weights[order]) - weights[order]
    first = int(np.searchsorted(before, share * weights.sum() - 1e-6))
    return float(times[order][first] if first < len(times) else np.nextafter(times.max(), np.inf))
