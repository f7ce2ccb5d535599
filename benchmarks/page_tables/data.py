"""Tables of what comes before and after training: preprocessing and serving."""

from __future__ import annotations

from benchmarks.data.formats import TEXT
from benchmarks.harness.rows import one, select
from benchmarks.page_tables.rows import EPYC_AVX2, EPYC_AVX512, XEON, committed, markdown, source


def preprocess() -> str:
    """Whole preprocessing runs, ours and the rivals'."""
    rows = committed(EPYC_AVX2, "preprocess")
    titles = {
        "comera-rec": "`comera preprocess`",
        "duckdb": "SQL for DuckDB",
        "polars": "Polars script",
        "pandas": "pandas script",
        "torchrec": "torchrec's functions",
    }
    lines = []
    for size in sorted({row.shapes["rows"] for row in rows}):
        cells = [f"{size:,}"]
        for provider in titles:
            ms, mib = (select(rows, provider=provider, unit=unit, rows=size) for unit in ("ms", "MiB"))
            cells.append(f"{ms[0].p50 / 1000:.1f} s, {mib[0].p50:,.0f} MiB" if ms else "")
        lines.append(cells)
    return markdown(["rows", *titles.values()], lines, left=0) + source(EPYC_AVX2, "preprocess")


def preprocess_memory() -> str:
    """Peak memory of preprocessing and its limit, by kind of log."""
    rows = committed(EPYC_AVX2, "preprocess-memory")
    limits = sorted({row.shapes["limit_mib"] for row in rows})
    lines = []
    for log in sorted({row.shapes["log"] for row in rows}):
        log_rows = {row.shapes["limit_mib"]: row for row in select(rows, log=log)}
        first = next(iter(log_rows.values()))
        peaks = [f"{log_rows[limit].p50:,.0f} MiB" if limit in log_rows else "" for limit in limits]
        lines.append([log, f"{first.shapes['rows']:,}", f"{first.counted['text_mib']:,.0f} MiB", *peaks])
    header = ["log", "rows", "text", *(f"peak at `--memory-limit {limit}MiB`" for limit in limits)]
    return markdown(header, lines) + source(EPYC_AVX2, "preprocess-memory")


def preprocess_formats() -> str:
    """Whole preprocessing runs of one log in several formats."""
    rows = committed(XEON, "preprocess-formats")
    lines = [
        [row.provider, f"{row.p50 / 1000:.1f} s", f"{row.counted['rows_per_cpu_s']:,.0f}", f"{1 / row.ratios[TEXT]:.1f}"]
        for row in rows
    ]
    header = [f"{rows[0].shapes['rows']:,} rows of 40 columns", "time", "rows a CPU second", "times text's time"]
    return markdown(header, lines) + source(XEON, "preprocess-formats")


def serve() -> str:
    """One call of a served model, compared with 8-bit tables."""
    rows = committed(EPYC_AVX512, "serve")
    names = {
        "fast int8": "`--form fast --dtype int8`",
        "fast float32": "`--form fast`",
        "portable float32": "`--form portable`",
        "dense int8, AOTInductor": "dense int8, compiled by AOTInductor",
        "TorchRec int8, eager": "dense int8, TorchRec's modules, eager",
    }
    batches = list(dict.fromkeys(row.shapes["batch"] for row in rows))
    lines = []
    for provider, title in names.items():
        calls = [one(rows, provider=provider, pass_="forward", batch=batch) for batch in batches]
        load = select(rows, provider=provider, pass_="run", unit="ms")
        memory = select(rows, provider=provider, pass_="run", unit="MiB")
        rest = (
            [f"{load[0].counted['bytes'] / 1e6:,.0f} MB", f"{load[0].p50:,.0f} ms", f"{memory[0].p50:,.0f} MiB"]
            if load
            else [""] * 3
        )
        lines.append([title, *(f"{row.p50:.2g} ms" if row.p50 < 10 else f"{row.p50:.1f} ms" for row in calls), *rest])
    header = ["median of a call", *(f"batch {batch:,}" for batch in batches), "file", "load", "memory"]
    return markdown(header, lines) + source(EPYC_AVX512, "serve")
