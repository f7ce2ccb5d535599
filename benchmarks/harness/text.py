"""Formats rows as text: a line for each row, below a title for their case."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness.rows import Row


def format_case(rows: Sequence[Row]) -> str:
    """Format all rows of one case: median, p20 to p80, ratios above 1 if it is better than the baseline, and what was counted."""
    first, width = rows[0], max(len(row.provider) for row in rows)
    sizes = ", ".join(f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}" for name, value in first.shapes.items())
    lines = [
        f"{first.op}, {sizes}, {first.dtype}",
        f"  ({first.machine}, threads {first.threads}, commit {first.commit}, seed {first.seed})",
    ]
    for row in rows:
        ratios = [f"{ratio:.2f}x vs {name}" for name, ratio in row.ratios.items() if name != row.provider]
        more = [*ratios, *(f"{name} {short(value)}" for name, value in row.counted.items())]
        spread = f"{row.p50:,.5g} {row.unit} ({short(row.p20)} to {short(row.p80)})"
        lines.append(f"  {row.pass_:<16} {row.provider:<{width}} {spread:<30} {', '.join(more)}".rstrip())
    return "\n".join(lines)


def short(value: float) -> str:
    """Format a number with three digits, or with all digits before the decimal point if there are more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
