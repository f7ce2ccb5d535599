"""Tables of embedding tables at equal bytes, ours and the rivals'."""

from __future__ import annotations

from collections import Counter
from itertools import product
from operator import itemgetter
from statistics import mean, stdev

from benchmarks.harness.rows import Row
from benchmarks.page_tables.rows import EPYC_AVX2, EPYC_AVX512, XEON, committed, markdown, select, source
from benchmarks.quality.data_sets import DECAYS
from benchmarks.quality.embeddings import SPLITS
from benchmarks.quality.runs import SEEDS, VARIANTS, VARIED, chosen
from benchmarks.quality.storage import DTYPES
from benchmarks.quality.summary import BEST, DATA_SETS, METRICS, NAMES, NOT_EQUAL, short_table

SPLIT_DATA = {"synth": "logs", "ml1m": "MovieLens", "video": "games"}
FOUND_OR_FIXED = ("TT fixed", "TT + rows", *SPLITS)


RAN_ON = (XEON, EPYC_AVX2, EPYC_AVX512)
"""Machines on which the benchmark's parts ran; predictions hardly depend on them."""


def _committed() -> list[Row]:
    return [row for machine in RAN_ON for row in committed(machine, "quality")]


def _measured() -> list[Row]:
    return [row for row in _committed() if row.shapes["data"] not in VARIED]


def _sources() -> str:
    return "".join(source(machine, "quality") for machine in RAN_ON)


def quality(metric: str) -> str:
    """NE or AUC at equal bytes, of our tables and the rivals'."""
    return short_table(_measured(), metric) + _sources()


def quality_of_dtypes() -> str:
    """NE and AUC of tables of each type that take equal bytes, on the logs."""
    rows = [row for row in _committed() if row.shapes["data"] == "synth"]
    by_dtype = {dtype: chosen(rows, dtype) for dtype in DTYPES}
    methods = [name for name in NAMES | {"hashing": ""} if any(row.provider == name for row in by_dtype["int8"])]
    sizes = sorted({row.shapes["compression"] for row in by_dtype["int8"]})
    lines = []
    for method in methods:
        cells = [NAMES.get(method, method)]
        for size in sizes:
            for dtype_rows in by_dtype.values():
                runs = select(dtype_rows, provider=method, compression=size)
                enough = len(runs) == SEEDS
                cells.append(f"{mean(map(METRICS['ne'], runs)):.4f}, {mean(map(METRICS['auc'], runs)):.4f}" if enough else "")
        lines.append(cells)
    titles = [f"{size:g}x, {dtype}" for size in sizes for dtype in by_dtype]
    return markdown(["NE, AUC", *titles], lines) + source(XEON, "quality") + source(EPYC_AVX512, "quality")


def quality_of_splits() -> str:
    """NE of the split between TT tables and hot rows that is found, and of the best of twenty fixed ones, at equal bytes."""
    runs = [row for row in chosen(_measured()) if row.provider in FOUND_OR_FIXED]
    lines = []
    for data, name in SPLIT_DATA.items():
        of_data = select(runs, data=data)
        counts = Counter((row.provider, row.shapes["compression"]) for row in of_data)
        seeds = range(min(counts.values()))  # those that all cases have
        for size in sorted({size for _, size in counts}):
            of_size = [row for row in of_data if row.shapes["compression"] == size and row.seed in seeds]
            nes = {provider: mean(row.p50 for row in select(of_size, provider=provider)) for provider, at in counts if at == size}
            found, fixed = nes["TT + rows"], {provider: ne for provider, ne in nes.items() if provider in SPLITS}
            best = min(fixed, key=fixed.__getitem__)
            share, width = SPLITS[best]
            best_cell = f"{fixed[best]:.4f}, {share:.0%} at width {width or 'N'}"
            better = f"{sum(ne < found for ne in fixed.values())} of {len(fixed)}"
            lines.append([name, f"{size:g}x", str(len(seeds)), f"{nes['TT fixed']:.4f}", f"{found:.4f}", best_cell, better])
    header = ["NE", "size", "seeds", "no hot rows", "hot rows as found", "best fixed split", "fixed splits that are better"]
    sources = [source(machine, "quality", "quality --only method=TT + 0*") for machine in (EPYC_AVX2, EPYC_AVX512)]
    return markdown(header, lines) + "".join(sources)


def quality_of_decays() -> str:
    """NE at 100x on logs whose rare values have large, smaller and small effects."""
    decays = dict(sorted(DECAYS.items(), key=itemgetter(1)))
    runs = [row for row in chosen(_committed()) if row.shapes["data"] in decays]
    runs = [row for row in runs if row.provider == "dense" or row.shapes["compression"] == 100]
    methods = [method for method in dict.fromkeys(["dense", *NAMES, *(row.provider for row in runs)]) if method not in VARIANTS]
    lines = []
    for method in methods:
        cells = []
        for data in decays:
            nes = [row.p50 for row in runs if (row.shapes["data"], row.provider) == (data, method)]
            cells.append(f"{mean(nes):.4f} ± {stdev(nes):.4f}" if len(nes) == SEEDS else "")
        if all(cells):
            lines.append([NAMES.get(method, method), *cells])
    return markdown(["NE", *(f"decay {decay:g}" for decay in decays.values())], lines) + _sources()


def equal_bytes() -> str:
    """Large tables compressed 100 times: TT with hot rows, the best rival at equal bytes, and dense tables."""
    lines = []
    for data, metric in product(("synth", "ml1m", "video"), ("ne", "auc")):
        runs = [row for row in chosen(_measured()) if row.shapes["data"] == data and row.provider not in VARIANTS]
        dense = mean(METRICS[metric](row) for row in runs if row.provider == "dense")
        by_method: dict[str, list[float]] = {}
        for row in runs:
            if row.shapes["compression"] == 100 and row.provider not in NOT_EQUAL:
                by_method.setdefault(row.provider, []).append(METRICS[metric](row))
        ours = mean(by_method["TT + rows"])
        rivals = {name: mean(values) for name, values in by_method.items() if not name.startswith("TT") and len(values) == SEEDS}
        rival = BEST[metric](rivals, key=rivals.__getitem__)
        best = BEST[metric](dense, ours, rivals[rival])
        cells = [f"**{value:.4f}**" if value == best else f"{value:.4f}" for value in (dense, ours, rivals[rival])]
        cells[2] += f", {NAMES.get(rival, rival)}"
        lines.append([f"{DATA_SETS[data]}: {metric.upper()}", *cells])
    return markdown(["", "dense", "TT with hot rows", "best rival"], lines) + _sources()
