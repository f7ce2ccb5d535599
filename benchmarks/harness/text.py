"""Formats rows as text: the case, and a line for each pass and provider."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.harness.rows import Row


def format_case(rows: Sequence[Row]) -> str:
    """Format all rows of one case; "4.20x vs nn.Linear" is less time, or memory, than that baseline's.

    What was counted follows each line, or the title if it is the same for all.
    """
    first = rows[0]
    common = {name: value for name, value in first.counted.items() if all(row.counted.get(name) == value for row in rows)}
    title = ", ".join([first.op, *(f"{name} {format_size(value)}" for name, value in first.shapes.items()), first.dtype])
    where = f"{first.machine}, {first.threads} thread{'s' * (first.threads != 1)}, commit {first.commit}, seed {first.seed}"
    width = max(len(f"{row.pass_}, {row.provider}") for row in rows)
    lines = [title, f"  ({where})", *([f"  {_counted(common)}"] if common else [])]
    for row in rows:
        own = {name: value for name, value in row.counted.items() if name not in common}
        spread = [f"{short(row.p20)}..{short(row.p80)}"] if row.samples > 1 else []
        ratios = [f"{ratio:.2f}x vs {name}" for name, ratio in row.ratios.items() if name != row.provider]
        parts = [f"{row.p50:>12,.4g} {row.unit}", *spread, *ratios, *([_counted(own)] if own else [])]
        lines.append(f"  {f'{row.pass_}, {row.provider}':<{width}}" + "; ".join(parts))
    return "\n".join(lines)


def short(value: float) -> str:
    """Format a number with three digits, or with all digits before the decimal point if there are more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def format_size(value: object) -> str:
    """Format a size for people: 1,000,000 or 8x8x8."""
    if isinstance(value, list):
        return "x".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)


def _counted(counted: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {short(value)}" for name, value in counted.items())
