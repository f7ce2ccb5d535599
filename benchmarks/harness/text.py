"""Formats rows as text: one aligned table per case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.harness.rows import Row


def case_title(row: Row) -> str:
    """Format the case in one line: "lookup, num_embeddings 1,000,000, order 2, ..."."""
    return ", ".join([row.op, *(f"{name} {format_size(value)}" for name, value in row.shapes.items()), row.dtype])


def format_case(rows: Sequence[Row]) -> str:
    """Format all rows of one case: a line for each pass and provider, with ratios such as "4.2x" faster than the baseline.

    What was counted follows each line, or the title if it is the same for all.
    """
    baselines = list(dict.fromkeys(name for row in rows for name in row.ratios))
    unit = next((row.unit for row in rows if row.unit != "MiB"), "MiB")
    first = rows[0]
    common = {name: value for name, value in first.counted.items() if all(row.counted.get(name) == value for row in rows)}
    by_line: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        by_line.setdefault((row.pass_, row.provider), {})[row.unit] = row
    cells = [["pass", "provider", f"p50 {unit}", "p20..p80", *(f"vs {name}" for name in baselines), "MiB", "counted"]]
    for line, by_unit in by_line.items():
        main, memory = by_unit.get(unit), by_unit.get("MiB") if unit != "MiB" else None
        spread = f"{short(main.p20)}..{short(main.p80)}" if main and main.samples > 1 else ""
        ratios = [f"{main.ratios[name]:.2f}x" if main and name in main.ratios else "" for name in baselines]
        own = {name: value for row in by_unit.values() for name, value in row.counted.items() if name not in common}
        cells.append([*line, _p50(main), spread, *ratios, _p50(memory), _counted(own)])
    used = [column for column in range(len(cells[0])) if any(line[column] for line in cells[1:])]
    cells = [[line[column] for column in used] for line in cells]
    table = aligned(cells, left=[column for column, name in enumerate(cells[0]) if name in ("pass", "provider", "counted")])
    where = f"{first.machine}, {first.threads} thread{'s' * (first.threads != 1)}, commit {first.commit}, seed {first.seed}"
    return "\n".join([case_title(first), f"  ({where})", *([f"  {_counted(common)}"] if common else []), *table])


def aligned(cells: Sequence[Sequence[str]], *, left: Sequence[int]) -> list[str]:
    """Format the lines of a table whose columns are flush right, except those in `left`."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  "
        + "  ".join(c.ljust(w) if k in left else c.rjust(w) for k, (c, w) in enumerate(zip(line, widths, strict=True))).rstrip()
        for line in cells
    ]


def short(value: float) -> str:
    """Format a number with three digits, or with all digits before the decimal point if there are more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def format_size(value: object) -> str:
    """Format a size for people: 1,000,000 or 8x8x8."""
    if isinstance(value, list):
        return "x".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)


def _p50(row: Row | None) -> str:
    digits = {"ms": 3, "MiB": 1, "instructions": 0}
    return f"{row.p50:,.{digits.get(row.unit, 4)}f}" if row else ""


def _counted(counted: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {short(value)}" for name, value in counted.items())
