"""Tables of embedding tables at equal bytes, ours and the rivals'."""

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from statistics import mean

from benchmarks.harness.rows import Row, select
from benchmarks.harness.trainings import SEEDS
from benchmarks.quality.data_sets import LOGS
from benchmarks.quality.runs import chosen
from benchmarks.quality.storage import BITS, DTYPES
from benchmarks.tables import EPYC_AVX2, EPYC_AVX512, XEON, committed, markdown, source, spread

Runs = list[Row]
METRICS: dict[str, Callable[[Runs], float]] = {
    "ne": lambda runs: mean(row.p50 for row in runs),
    "auc": lambda runs: mean(row.counted["auc"] for row in runs),
}
DATA_SETS = {
    "synth": "a million synthetic Criteo rows, Kaggle's cardinalities",
    "ml1m": "MovieLens-1M, implicit feedback",
    "video": "Amazon video games, implicit feedback, users' last item, 31,000 x 24,000",
}
NAMES = {
    "dense": "dense", "TT + rows": "TT with hot rows", "TT + rows adaptive": "the same, ranks and widths adapted to the budget",
    "TT fixed": "TT, one rank", "TT adaptive": "TT, ranks adapted", "TT SVD": "TT-SVD after half of the steps",
    "mixed dim": "mixed dimensions", "CAFE": "rows of hot ids, hashing for others (CAFE)", "QR": "quotient-remainder",
    "QR in parts": "quotient-remainder in parts", "hashing": "hashing", "low rank": "low rank", "ROBE": "ROBE",
    "neighbors": "neighbors share a row",
}  # fmt: skip
"""Names of all methods, in the order of the tables."""
FEEDBACK = ("ml1m", "video")
STARTS = ("random", "vectors")
KNOWLEDGE = {("random", "none"): "", ("vectors", "none"): ", from vectors", ("vectors", "dense"): ", from vectors, distilled"}
"""Start and teacher -> how a table calls them."""
MEANING = "quality --data DATA --only order=similarity,start=vectors,dtype=int8"
RAN_ON = (XEON, EPYC_AVX2, EPYC_AVX512)
"""Machines on which the benchmark's parts ran; predictions hardly depend on them."""


def _committed() -> list[Row]:
    return [row for machine in RAN_ON for row in committed(machine, "quality")]


def _sources(*machines: str, command: str = "") -> str:
    return "".join(source(machine, "quality", command) for machine in machines or RAN_ON)


def _cell(runs: Runs, metrics: Sequence[str] = ("ne", "auc")) -> str:
    """Format means over all seeds; nothing if some are missing."""
    return ", ".join(f"{METRICS[metric](runs):.4f}" for metric in metrics) if len(runs) == SEEDS else ""


def _grid(
    header: Sequence[str],
    sections: Mapping[str, Mapping[str, Sequence[Runs]]],
    *,
    metrics: Sequence[str] = ("ne", "auc"),
    marks: bool = False,
) -> str:
    """Format a table of means: sections, each below its title if it has one, of lines of runs.

    Lines without a cell are left out. With `marks`, a section's best cells of each column, by the first metric, are bold.
    """
    lines = []
    for title, by_name in sections.items():
        cells = {name: [_cell(runs, metrics) for runs in line] for name, line in by_name.items()}
        columns = zip(*cells.values(), strict=True)
        best = [(max if metrics[0] == "auc" else min)(filter(None, column), default="") for column in columns]
        lines += [[title, *[""] * (len(header) - 1)]] if title else []
        for name, line in cells.items():
            if any(line):
                bold = [f"**{cell}**" if marks and cell and cell == of else cell for cell, of in zip(line, best, strict=True)]
                lines.append([name, *bold])
    return markdown(header, lines)


def quality(metric: str) -> str:
    """Means of NE or AUC at equal bytes, of our tables and the rivals'; the best are bold, the dense model's are in the titles."""
    rows = select(chosen(_committed()), data="synth")
    sizes = sorted({row.shapes["compression"] for row in rows})
    lines = {name: [select(rows, provider=method, compression=size) for size in sizes] for method, name in NAMES.items()}
    del lines["dense"]
    title = f"{DATA_SETS['synth']}; dense {_cell(select(rows, provider='dense'), [metric])}"
    return _grid(["", *(f"{size:g}x" for size in sizes)], {title: lines}, metrics=[metric], marks=True) + _sources()


def quality_of_dtypes() -> str:
    """NE and AUC of tables of each type that take equal bytes, on the logs."""
    rows = [row for row in _committed() if row.shapes["data"] == "synth"]
    by_dtype = {dtype: chosen(rows, dtype) for dtype in DTYPES}
    sizes = sorted({row.shapes["compression"] for row in by_dtype["int8"]})
    lines = {
        name: [select(of_type, provider=method, compression=size) for size in sizes for of_type in by_dtype.values()]
        for method, name in NAMES.items()
        if select(by_dtype["int8"], provider=method)
    }
    header = ["NE, AUC", *(f"{size:g}x, {dtype}" for size in sizes for dtype in by_dtype)]
    return _grid(header, {"": lines}) + _sources(XEON, EPYC_AVX512)


def quality_with_meaning() -> str:
    """NE and AUC of tables of equal bytes in int8, whose ids are in an order of similarity, from random values and from vectors."""
    sizes, by_knowledge = (10, 50, 100), _by_knowledge()
    sections = {}
    for data in FEEDBACK:
        dense = [_cell(_dense(data, start)) for start in STARTS]
        sections[f"{DATA_SETS[data]}; dense float32 {dense[0]}, from vectors {dense[1]}"] = {
            NAMES[method] + name: [select(rows, data=data, provider=method, compression=size) for size in sizes]
            for method in NAMES
            for name, rows in by_knowledge.items()
        }
    header = ["NE, AUC", *(f"{size}x" for size in sizes)]
    return _grid(header, sections, marks=True) + _sources(EPYC_AVX512, command=MEANING)


def quality_of_rounded() -> str:
    """NE and AUC of dense tables from vectors, rounded after training to fewer bits."""
    runs = chosen(_committed(), order="similarity", start="vectors")
    rounded = {data: [select(runs, data=data, provider=method) for method in BITS] for data in FEEDBACK}
    lines = {DATA_SETS[data]: [_dense(data, "vectors"), *of_data] for data, of_data in rounded.items()}
    sizes = [of[0].counted["dense_bytes"] / of[0].counted["bytes"] for of in rounded[FEEDBACK[-1]]]
    header = ["NE, AUC", "float32", *(f"{bits} bits, {size:.1f}x" for bits, size in zip(BITS.values(), sizes, strict=True))]
    command = "quality --data DATA --only 'order=similarity,start=vectors,method=dense int4'"
    return _grid(header, {"": lines}) + _sources(EPYC_AVX512, command=command)


def _by_knowledge() -> dict[str, list[Row]]:
    """The runs in int8 and in order of similarity, by what they know."""
    return {name: chosen(_committed(), "int8", "similarity", *knowledge) for knowledge, name in KNOWLEDGE.items()}


def quality_with_groups() -> str:
    """NE and AUC on the log whose values occur in groups: dense tables, and others at 100x in float32."""
    by_start = [chosen(_committed()), chosen(_committed(), order="similarity", start="vectors")]
    lines = {
        name: [
            select(rows, data=data, provider=method, compression=10 if method == "dense" else 100)
            for data in ("synth-groups", "synth-groups-10M")
            for rows in by_start
        ]
        for method, name in NAMES.items()
    }
    vectors = "by similarity, from vectors"
    header = ["NE, AUC", "1M rows, by frequency", vectors, "10M rows, by frequency", vectors]
    command = "quality --only data=synth-groups,order=similarity,start=vectors"
    return _grid(header, {"": lines}) + _sources(EPYC_AVX512, command=command)


def quality_of_converted() -> str:
    """NE and AUC of trained dense tables that TT-SVD converts, without training afterwards."""
    runs, sizes = chosen(_committed()), (4, 10)
    names = {"converted": "rows as they are", "converted in order": "similar rows as neighbors"}
    sections = {
        f"{DATA_SETS[data]}; dense {_cell(_dense(data, 'random'))}": {
            name: [select(runs, data=data, provider=method, compression=size) for size in sizes] for method, name in names.items()
        }
        for data in FEEDBACK
    }
    header = ["NE, AUC", *(f"{size}x, orders included" for size in sizes)]
    return _grid(header, sections) + _sources(EPYC_AVX512, command="quality --data DATA --only method=converted")


def _dense(data: str, start: str) -> list[Row]:
    """The runs of the usual dense table, with ids in order of frequency, or of one that starts from vectors."""
    rows = chosen(_committed(), order="similarity" if start == "vectors" else "frequency", start=start)
    return select(rows, data=data, provider="dense")


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
        best = {method: min(both, key=METRICS["ne"]) for method, both in whole.items() if both}
        rival = min((method for method in best if not method.startswith("TT")), key=lambda method: METRICS["ne"](best[method]))
        cells = [_cell(runs) for runs in (*(_dense(data, start) for start in STARTS), best["TT fixed"], best[rival])]
        lines.append([DATA_SETS[data], *cells[:3], f"{cells[3]}, {NAMES[rival]}"])
    header = ["NE, AUC", "dense, as usual", "dense, from vectors", "TT, a tenth of the bytes", "best rival, a tenth of the bytes"]
    return markdown(header, lines) + _sources(EPYC_AVX512, command=MEANING)
