"""Formats rows as text: one aligned table per case."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness.limits import describe_limits
from benchmarks.harness.rows import Row
from benchmarks.harness.workload import PASSES


def case_title(row: Row) -> str:
    """Format the case in one line: "lookup, num_embeddings 1,000,000, order 2, ..."."""
    return ", ".join([row.op, *(f"{name} {format_size(value)}" for name, value in row.shapes.items()), row.dtype])


def format_case(rows: Sequence[Row]) -> str:
    """Format all rows of one case: a line for each pass and provider, with ratios such as "4.2x" faster than the baseline."""
    baselines = list(dict.fromkeys(name for row in rows for name in row.ratios))
    names = list(dict.fromkeys(row.provider for row in rows))
    cells = [["pass", "provider", "p50 ms", "p20..p80", *(f"vs {b}" for b in baselines), "of limit", "extra MiB"]]
    for pass_ in PASSES:
        for name in names:
            selected = {row.unit: row for row in rows if row.pass_ == pass_ and row.provider == name}
            if selected:
                ms, mib = selected.get("ms"), selected.get("MiB")
                spread = f"{_short(ms.p20)}..{_short(ms.p80)}" if ms else ""
                cells.append([pass_, name, _p50(ms), spread, *_ratios(ms, baselines), _of_limit(ms), _p50(mib)])
    used = [column for column in range(len(cells[0])) if any(line[column] for line in cells[1:])]
    cells = [[line[column] for column in used] for line in cells]
    row = rows[0]
    where = f"{row.machine}, {row.threads} thread{'s' * (row.threads != 1)}, commit {row.commit}, seed {row.seed}"
    limits = [f"  ({describe_limits(row.counted)})"] if "limit_ms" in row.counted else []
    return "\n".join([case_title(row), f"  ({where})", *limits, *aligned(cells, left=(0, 1))])


def aligned(cells: Sequence[Sequence[str]], *, left: Sequence[int]) -> list[str]:
    """Format the lines of a table whose columns are flush right, except those in `left`."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  "
        + "  ".join(c.ljust(w) if k in left else c.rjust(w) for k, (c, w) in enumerate(zip(line, widths, strict=True))).rstrip()
        for line in cells
    ]


def _p50(row: Row | None) -> str:
    return "" if row is None else f"{row.p50:,.3f}" if row.unit == "ms" else f"{row.p50:,.1f}"


def _of_limit(row: Row | None) -> str:
    """Format a median divided by the least time that the pass's bytes or multiply-adds take on this machine."""
    return f"{row.p50 / row.counted['limit_ms']:.1f}x" if row and "limit_ms" in row.counted else ""


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ratios(row: Row | None, baselines: Sequence[str]) -> list[str]:
    return [f"{row.ratios[name]:.2f}x" if row and name in row.ratios else "" for name in baselines]


def format_size(value: object) -> str:
    """Format a size for people: 1,000,000 or 8x8x8."""
    if isinstance(value, list):
        return "x".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)
