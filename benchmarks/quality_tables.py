"""Tables of embedding tables at equal bytes, ours and the rivals'."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from operator import itemgetter
from statistics import mean
from typing import Any

from benchmarks.harness.rows import Row, select
from benchmarks.harness.trainings import SEEDS
from benchmarks.quality.data_sets import LOGS
from benchmarks.quality.embeddings import SPLITS
from benchmarks.quality.runs import VARIED, chosen
from benchmarks.quality.storage import BITS, DTYPES
from benchmarks.tables import EPYC_AVX2, EPYC_AVX512, XEON, committed, markdown, source, spread

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
    "neighbors": "neighbors share a row",
    "prefixes": "sum of rows of three prefixes",
    "group and place": "row of a group + row of a place",
}
"""Names of all methods, in the order of the tables."""
NOT_EQUAL = ("CCE",)  # its budget leaves out the bytes of the codes
SPLIT_DATA = {"synth": "logs"}
FEEDBACK = ("ml1m", "video")
STARTS = ("random", "vectors")
KNOWLEDGE = {("random", "none"): "", ("vectors", "none"): ", from vectors", ("vectors", "dense"): ", from vectors, distilled"}
"""Start and teacher -> how a table calls them."""
MEANING = "quality --data DATA --only order=similarity,start=vectors,dtype=int8"
FOUND_OR_FIXED = ("TT fixed", "TT + rows", *SPLITS)
RAN_ON = (XEON, EPYC_AVX2, EPYC_AVX512)
"""Machines on which the benchmark's parts ran; predictions hardly depend on them."""


def _committed() -> list[Row]:
    return [row for machine in RAN_ON for row in committed(machine, "quality")]


def _measured() -> list[Row]:
    return [row for row in _committed() if row.shapes["data"] not in (*VARIED, *FEEDBACK)]


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


def quality_with_meaning() -> str:
    """NE and AUC of tables of equal bytes in int8, whose ids are in an order of similarity, from random values and from vectors."""
    lines, sizes = [], (10, 50, 100)
    by_knowledge = _by_knowledge()
    for data in FEEDBACK:
        dense = [_dense(data, start) for start in STARTS]
        title = f"{DATA_SETS[data]}; dense float32 {_ne_and_auc(dense[0])}, from vectors {_ne_and_auc(dense[1])}"
        lines.append([title, *[""] * len(sizes)])
        runs = {
            NAMES[method] + name: [select(rows, data=data, provider=method, compression=size) for size in sizes]
            for method in NAMES
            for name, rows in by_knowledge.items()
        }
        best = [min((_mean_ne(of[k]) for of in runs.values() if len(of[k]) == SEEDS), default=0) for k in range(len(sizes))]
        for name, of in runs.items():
            if any(len(each) == SEEDS for each in of):
                cells = [
                    f"**{_ne_and_auc(each)}**" if each and _mean_ne(each) == best[k] else _ne_and_auc(each)
                    for k, each in enumerate(of)
                ]
                lines.append([name, *cells])
    return markdown(["NE, AUC", *(f"{size}x" for size in sizes)], lines) + source(EPYC_AVX512, "quality", MEANING)


def quality_of_rounded() -> str:
    """NE and AUC of dense tables from vectors, rounded after training to fewer bits."""
    runs = chosen(_committed(), order="similarity", start="vectors")
    lines = []
    for data in FEEDBACK:
        rounded = [select(runs, data=data, provider=method) for method in BITS]
        lines.append([DATA_SETS[data], *map(_ne_and_auc, (_dense(data, "vectors"), *rounded))])
    sizes = [of[0].counted["dense_bytes"] / of[0].counted["bytes"] for of in rounded]
    header = ["NE, AUC", "float32", *(f"{bits} bits, {size:.1f}x" for bits, size in zip(BITS.values(), sizes, strict=True))]
    command = "quality --data DATA --only order=similarity,start=vectors,method=dense int4"
    return markdown(header, lines) + source(EPYC_AVX512, "quality", command)


def _by_knowledge() -> dict[str, list[Row]]:
    """The runs in int8 and in order of similarity, by what they know."""
    return {name: chosen(_committed(), "int8", "similarity", *knowledge) for knowledge, name in KNOWLEDGE.items()}


def quality_with_groups() -> str:
    """NE and AUC on the log whose values occur in groups: dense tables, and others at 100x in float32."""
    by_start = [chosen(_committed()), chosen(_committed(), order="similarity", start="vectors")]
    lines = []
    for method, name in NAMES.items():
        size = 10 if method == "dense" else 100
        cells = [
            _ne_and_auc(select(rows, data=data, provider=method, compression=size))
            for data in ("synth-groups", "synth-groups-10M")
            for rows in by_start
        ]
        if any(cells):
            lines.append([name, *cells])
    header = [
        "NE, AUC",
        "1M rows, by frequency",
        "by similarity, from vectors",
        "10M rows, by frequency",
        "by similarity, from vectors",
    ]
    return markdown(header, lines) + source(
        EPYC_AVX512, "quality", "quality --only data=synth-groups,order=similarity,start=vectors"
    )


def quality_of_converted() -> str:
    """NE and AUC of trained dense tables that TT-SVD converts, without training afterwards."""
    runs, sizes = chosen(_committed()), (4, 10)
    lines = []
    for data in FEEDBACK:
        lines.append([f"{DATA_SETS[data]}; dense {_ne_and_auc(_dense(data, 'random'))}", *[""] * len(sizes)])
        for method, name in {"converted": "rows as they are", "converted in order": "similar rows as neighbors"}.items():
            lines.append([name, *(_ne_and_auc(select(runs, data=data, provider=method, compression=size)) for size in sizes)])
    header = ["NE, AUC", *(f"{size}x, orders included" for size in sizes)]
    return markdown(header, lines) + source(EPYC_AVX512, "quality", "quality --data DATA --only method=converted")


def _dense(data: str, start: str) -> list[Row]:
    """The runs of the usual dense table, with ids in order of frequency, or of one that starts from vectors."""
    rows = chosen(_committed(), order="similarity" if start == "vectors" else "frequency", start=start)
    return select(rows, data=data, provider="dense")


def _mean_ne(runs: list[Row]) -> float:
    return mean(map(METRICS["ne"], runs))


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
    """NE and AUC of dense tables, of TT tables in int8 at a tenth of their bytes, and of the best rival at these bytes."""
    lines = []
    for data in FEEDBACK:
        by_knowledge = _by_knowledge().values()
        runs = {method: [select(rows, data=data, provider=method, compression=10) for rows in by_knowledge] for method in NAMES}
        whole = {method: [of for of in both if len(of) == SEEDS] for method, both in runs.items() if method != "dense"}
        best = {method: min(both, key=_mean_ne) for method, both in whole.items() if both}
        rival = min((method for method in best if not method.startswith("TT")), key=lambda method: _mean_ne(best[method]))
        cells = [*(_ne_and_auc(_dense(data, start)) for start in STARTS), _ne_and_auc(best["TT fixed"]), _ne_and_auc(best[rival])]
        lines.append([DATA_SETS[data], *cells[:3], f"{cells[3]}, {NAMES[rival]}"])
    header = ["NE, AUC", "dense, as usual", "dense, from vectors", "TT, a tenth of the bytes", "best rival, a tenth of the bytes"]
    return markdown(header, lines) + source(EPYC_AVX512, "quality", MEANING)
