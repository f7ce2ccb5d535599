"""Tables of embedding tables at equal bytes, ours and the rivals'."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product
from operator import itemgetter
from statistics import mean
from typing import Any, get_args

from benchmarks.harness.rows import Row, select
from benchmarks.harness.trainings import SEEDS
from benchmarks.quality.data_sets import LOGS
from benchmarks.quality.embeddings import SPLITS
from benchmarks.quality.runs import VARIED, chosen
from benchmarks.quality.storage import DTYPES
from benchmarks.tables import EPYC_AVX2, EPYC_AVX512, XEON, committed, markdown, source, spread
from data_pipeline.manifest import Order

METRICS: dict[str, Callable[[Row], float]] = {
    "ne": lambda row: row.p50,
    "auc": lambda row: row.counted["auc"],
}
BEST: dict[str, Any] = {"ne": min, "auc": max}
DATA_SETS = {
    "synth": "a million synthetic Criteo rows, Kaggle's cardinalities",
    "ml1m": "MovieLens-1M, implicit feedback",
    "video": "Amazon video games, implicit feedback, users' last item, 31,000 x 24,000",
}
NAMES = {
    "dense": "dense",
    "TT + rows": "TT with hot rows",
    "TT + rows adaptive": "the same, ranks and widths adapted to the budget",
    "TT fixed": "TT, one rank",
    "TT adaptive": "TT, ranks adapted",
    "TT SVD": "TT-SVD after half of the steps",
    "mixed dim": "mixed dimensions",
    "CAFE": "rows of hot ids, hashing for others (CAFE)",
    "QR": "quotient-remainder",
    "QR in parts": "quotient-remainder in parts",
    "DHE": "an MLP over hashes (DHE)",
    "MGQE": "product quantization (MGQE)",
    "CCE": "clustered codes (CCE), codes not counted",
    "PEP": "learned thresholds (PEP)",
    "pruning": "magnitude pruning",
    "hashing": "hashing",
    "low rank": "low rank",
    "ROBE": "ROBE",
    "two hashes": "two hashes",
}
"""Names of all methods, in the order of the tables."""
NOT_EQUAL = ("CCE",)  # its budget leaves out the bytes of the codes
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
    """Means of NE or AUC at equal bytes, of our tables and the rivals'; the best are bold, the dense model's are in the titles."""
    rows = chosen(_measured())
    sizes = sorted({row.shapes["compression"] for row in rows})
    lines = []
    for data in dict.fromkeys(row.shapes["data"] for row in rows):
        means: dict[str, dict[float, str]] = {}
        for method in NAMES:
            runs = {size: select(rows, data=data, provider=method, compression=size) for size in sizes}
            means[method] = {size: f"{mean(map(METRICS[metric], of)):.4f}" for size, of in runs.items() if len(of) == SEEDS}
        dense = "".join(f"; dense {value}" for value in means.pop("dense").values())
        lines.append([DATA_SETS[data] + dense, *[""] * len(sizes)])
        equal = [by_size for method, by_size in means.items() if method not in NOT_EQUAL]
        best = {size: BEST[metric]([by_size[size] for by_size in equal if size in by_size]) for size in sizes}
        for method, by_size in means.items():
            if by_size:
                marks = [
                    f"**{by_size[size]}**" if by_size in equal and by_size.get(size) == best[size] else by_size.get(size, "")
                    for size in sizes
                ]
                lines.append([NAMES[method], *marks])
    return markdown(["", *(f"{size:g}x" for size in sizes)], lines) + _sources()


def quality_of_dtypes() -> str:
    """NE and AUC of tables of each type that take equal bytes, on the logs."""
    rows = [row for row in _committed() if row.shapes["data"] == "synth"]
    by_dtype = {dtype: chosen(rows, dtype) for dtype in DTYPES}
    methods = [name for name in NAMES if any(row.provider == name for row in by_dtype["int8"])]
    sizes = sorted({row.shapes["compression"] for row in by_dtype["int8"]})
    lines = []
    for method in methods:
        cells = [NAMES[method]]
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
    header = ["NE", "size", "seeds", "no hot rows", "hot rows by the rule", "best fixed split", "fixed splits that are better"]
    sources = [source(machine, "quality", "quality --only method=TT + 0*") for machine in (EPYC_AVX2, EPYC_AVX512)]
    return markdown(header, lines) + "".join(sources)


def quality_of_orders() -> str:
    """NE and AUC of TT tables whose ids are numbered by frequency and by similarity, beside dense tables."""
    by_order = {order: chosen(_committed(), order=order) for order in get_args(Order)}
    names = DATA_SETS | {"synth-groups": "a million synthetic Criteo rows whose values have groups"}
    lines = []
    for data in dict.fromkeys(row.shapes["data"] for row in by_order["similarity"]):
        dense = select(by_order["frequency"], data=data, provider="dense") or select(
            by_order["similarity"], data=data, provider="dense"
        )
        lines.append([f"{names[data]}; dense {_ne_and_auc(dense)}", "", "", "", ""])
        for method in ("TT fixed", "TT + rows"):
            for order, rows in by_order.items():
                runs = [select(rows, data=data, provider=method, compression=size) for size in (10, 50, 100, 500)]
                if any(runs):
                    lines.append([f"{NAMES[method]}, by {order}", *map(_ne_and_auc, runs)])
    command = "quality --data DATA --only 'order=similarity,method=TT fixed'"
    return markdown(["NE, AUC", "10x", "50x", "100x", "500x"], lines) + _sources() + source(EPYC_AVX512, "quality", command)


def _ne_and_auc(runs: list[Row]) -> str:
    return f"{mean(map(METRICS['ne'], runs)):.4f}, {mean(map(METRICS['auc'], runs)):.4f}" if len(runs) == SEEDS else ""


def quality_of_decays() -> str:
    """NE at 100x on logs whose rare values have large, smaller and small effects."""
    decays = dict(sorted(((data, log["decay"]) for data, log in LOGS.items() if "decay" in log), key=itemgetter(1)))
    runs = [row for row in chosen(_committed()) if row.shapes["data"] in decays]
    runs = [row for row in runs if row.provider == "dense" or row.shapes["compression"] == 100]
    lines = []
    for method, name in NAMES.items():
        nes = [[row.p50 for row in select(runs, data=data, provider=method)] for data in decays]
        if all(len(each) == SEEDS for each in nes):
            lines.append([name, *map(spread, nes)])
    return markdown(["NE", *(f"decay {decay:g}" for decay in decays.values())], lines) + _sources()


def equal_bytes() -> str:
    """Large tables compressed 100 times: TT with hot rows, the best rival at equal bytes, and dense tables."""
    lines = []
    for data, metric in product(DATA_SETS, METRICS):
        runs = select(chosen(_measured()), data=data)
        means = {}
        for method in NAMES:
            of_method = [row for row in select(runs, provider=method) if method == "dense" or row.shapes["compression"] == 100]
            if len(of_method) == SEEDS and method not in NOT_EQUAL:
                means[method] = mean(map(METRICS[metric], of_method))
        best = BEST[metric]
        rival = best((method for method in means if method != "dense" and not method.startswith("TT")), key=means.__getitem__)
        shown = [means[method] for method in ("dense", "TT + rows", rival)]
        cells = [f"**{value:.4f}**" if value == best(shown) else f"{value:.4f}" for value in shown]
        lines.append([f"{DATA_SETS[data]}: {metric.upper()}", *cells[:2], f"{cells[2]}, {NAMES[rival]}"])
    return markdown(["", "dense", "TT with hot rows", "best rival"], lines) + _sources()
