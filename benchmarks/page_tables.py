"""What the tables of README and docs show of the rows under results/: a function for each table, from rows to Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.data.formats import TEXT
from benchmarks.harness.rows import Row, read_rows
from benchmarks.quality.embeddings import SPLITS
from benchmarks.quality.runs import SEEDS, VARIANTS, chosen
from benchmarks.quality.summary import BEST, DATA_SETS, METRICS, NAMES, NOT_EQUAL, short_table
from benchmarks.text.summary import code_table, sst2_table

RESULTS = Path(__file__).parent / "results"
XEON, EPYC, EPYC_AVX2 = "cpu-2-intel-xeon-processor-avx512", "cpu-2-amd-epyc", "cpu-2-amd-epyc-avx2"
MACHINES = {
    XEON: "2 cores of an Intel Xeon with AVX-512",
    EPYC: "2 cores of an AMD EPYC",
    EPYC_AVX2: "2 cores of an AMD EPYC with AVX2",
}
OURS = "TTEmbeddingBagCollection, updated in backward"


@cache
def _rows(machine: str, benchmark: str) -> list[Row]:
    return read_rows(RESULTS / machine / f"{benchmark}.jsonl")


def _select(measured: Sequence[Row], /, *, provider: str = "", pass_: str = "", unit: str = "", **sizes: Any) -> list[Row]:
    """Rows of a provider, pass, unit and sizes."""
    wanted = {"provider": provider, "pass_": pass_, "unit": unit}
    return [
        row
        for row in measured
        if all(getattr(row, name) == value for name, value in wanted.items() if value)
        and all(row.shapes.get(name) == value for name, value in sizes.items())
    ]


def _one(measured: Sequence[Row], /, **wanted: Any) -> Row:
    (row,) = _select(measured, **wanted)
    return row


def _markdown(header: Sequence[str], lines: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """A table whose first `left` columns are flush left."""
    rule = ["---"] * left + ["---:"] * (len(header) - left)
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *lines))


def _source(machine: str, benchmark: str, command: str = "") -> str:
    """The line below a table: hardware, versions, the command and its rows."""
    versions = sorted({row.versions["torch"] for row in _rows(machine, benchmark)})
    return (
        f"\n\n{MACHINES[machine]} (virtual), torch {', '.join(versions)}; "
        f"`python -m benchmarks.run {command or benchmark}`, [rows](results/{machine}/{benchmark}.jsonl)."
    )


def _short(value: float) -> str:
    """Three digits, or all of a longer number's."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _spread(values: Sequence[float], digits: int = 4) -> str:
    return f"{mean(values):.{digits}f} ± {stdev(values):.{digits}f}"


def whole_model() -> str:
    """The DLRM of ten million rows, dense and compressed."""
    rows = _rows(XEON, "dlrm")
    forms = [_select(rows, provider=name, data="synth-10M") for name in ("dense", "TT adaptive")]

    def line(name: str, show: Callable[[list[Row]], str]) -> list[str]:
        return [name, *map(show, forms)]

    def counted(name: str) -> Callable[[list[Row]], list[float]]:
        return lambda form: [row.counted[name] for row in form]

    def span(values: list[float]) -> str:
        low, high = (f"{value:,.0f}" for value in (min(values), max(values)))
        return low if low == high else f"{low} to {high}"

    lines = [
        line("parameters", lambda form: f"{form[0].counted['params']:,.0f}"),
        line("model", lambda form: f"{form[0].counted['bytes'] / 2**20:,.0f} MiB"),
        line("normalized cross-entropy, lower is better", lambda form: _spread([row.p50 for row in form])),
        line("AUC", lambda form: f"{mean(counted('auc')(form)):.4f}"),
        line("peak memory of training, beyond the libraries", lambda form: f"{span(counted('peak_mib')(form))} MiB"),
        line("time of a step, batch 2,048", lambda form: f"{span(counted('step_ms')(form))} ms"),
    ]
    return _markdown(["", "dense", "compressed"], lines) + _source(XEON, "dlrm", "dlrm --only data=synth-10M")


def kaggle_model() -> str:
    """The DLRM of a million rows, 99 times smaller, dense, TT, and TT with hot rows."""
    rows = _rows(EPYC, "dlrm")
    lines = []
    for title, provider in {"dense": "dense", "TT": "TT adaptive", "TT with hot rows": "TT + rows adaptive"}.items():
        best = _best_rate(_select(rows, provider=provider))
        lines.append(
            [
                title,
                f"{best[0].counted['params']:,.0f}",
                _spread([row.p50 for row in best]),
                f"{mean(row.counted['auc'] for row in best):.4f}",
            ]
        )
    lines.append(["the best that any model can reach", "", *(f"{rows[0].counted[name]:.4f}" for name in ("best_ne", "best_auc"))])
    return _markdown(["", "parameters", "NE", "AUC"], lines) + _source(EPYC, "dlrm")


def _best_rate(rows: Sequence[Row]) -> list[Row]:
    """The rows of the learning rate whose runs do best on the validation split."""
    by_rate: dict[float, list[Row]] = {}
    for row in rows:
        by_rate.setdefault(row.shapes["lr"], []).append(row)
    most = max(map(len, by_rate.values()))
    return min((of for of in by_rate.values() if len(of) == most), key=lambda of: mean(row.counted["val_ne"] for row in of))


def quality(metric: str, data: str = "") -> str:
    """NE or AUC at equal bytes, ours and the rivals."""
    rows = [row for row in _rows(XEON, "quality") if data in ("", row.shapes["data"])]
    return short_table(rows, metric) + _source(XEON, "quality")


def quality_of_int8() -> str:
    """NE and AUC of tables of int8 numbers beside those of float32 numbers that take equal bytes, on the logs."""
    rows = [row for row in _rows(XEON, "quality") if row.shapes["data"] == "synth"]
    by_dtype = {dtype: chosen(rows, dtype) for dtype in ("float32", "int8")}
    methods = [name for name in NAMES | {"hashing": ""} if any(row.provider == name for row in by_dtype["int8"])]
    sizes = sorted({row.shapes["compression"] for row in by_dtype["int8"]})
    lines = []
    for method in methods:
        cells = [NAMES.get(method, method)]
        for size in sizes:
            for of_dtype in by_dtype.values():
                runs = _select(of_dtype, provider=method, compression=size)
                enough = len(runs) == SEEDS
                cells.append(f"{mean(map(METRICS['ne'], runs)):.4f}, {mean(map(METRICS['auc'], runs)):.4f}" if enough else "")
        lines.append(cells)
    titles = [f"{size:g}x, {dtype}" for size in sizes for dtype in by_dtype]
    return _markdown(["NE, AUC", *titles], lines) + _source(XEON, "quality")


def quality_of_splits() -> str:
    """NE of fixed splits between TT tables and hot rows of one width, beside the split that is found; one seed, on the logs."""
    rows = [row for row in _rows(XEON, "quality") if row.shapes["data"] == "synth" and row.shapes["compression"] == 100]
    runs = {row.provider: METRICS["ne"](row) for row in chosen(rows) if row.seed == 0}
    widths = dict.fromkeys(width or "N" for _, width in SPLITS.values())
    shares = dict.fromkeys(share for share, _ in SPLITS.values())
    lines = [
        [
            f"{share:g} of the bytes",
            *(f"{runs[name]:.4f}" if (name := f"TT + {share:g} at {width}") in runs else "" for width in widths),
        ]
        for share in shares
    ]
    none, found = runs["TT fixed"], runs["TT + rows"]
    header = [f"NE; no hot rows {none:.4f}, as found {found:.4f}", *(f"width {width}" for width in widths)]
    return _markdown(header, lines) + _source(XEON, "quality", "quality --only method=TT + 0*")


def equal_bytes() -> str:
    """Large tables 100 times smaller: TT with hot rows, the best rival of equal bytes, dense tables."""
    lines = []
    for data, metric in (("synth", "ne"), ("synth", "auc"), ("ml1m", "ne"), ("video", "ne"), ("video", "auc")):
        runs = [row for row in chosen(_rows(XEON, "quality")) if row.shapes["data"] == data and row.provider not in VARIANTS]
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
    return _markdown(["", "dense", "TT with hot rows", "best rival"], lines) + _source(XEON, "quality")


def lookup() -> str:
    """A training step over the seven largest tables of Criteo-Kaggle."""
    rows = _select(_rows(XEON, "lookup"), batch=16384, dim=64)
    columns = {
        "nn.EmbeddingBag sparse": "`nn.EmbeddingBag`",
        "FBGEMM": "FBGEMM",
        "TTM no dedup": "TT without dedup",
        "TTM row dedup": "TT, unique rows",
        OURS: "ours",
    }
    lines = []
    for order, rank in dict.fromkeys((row.shapes["order"], row.shapes["rank"]) for row in rows):
        case = _select(rows, order=order, rank=rank, pass_="step")
        ms = {name: _one(case, provider=name, unit="ms") for name in columns}
        extra = [_one(case, provider=name, unit="MiB").p50 for name in ("FBGEMM", OURS)]
        lines.append(
            [
                f"order {order}, TT rank {rank}",
                f"{_one(case, provider=OURS, unit='ms').counted['compression']:,.0f}x",
                *(f"{row.p50:,.1f}" for row in ms.values()),
                f"{ms[OURS].p50 / ms['FBGEMM'].p50:.2f}x",
                f"{extra[0]:.0f} / {extra[1]:.0f} MiB",
            ]
        )
    header = ["TT tables", "smaller", *columns.values(), "of FBGEMM's", "extra memory, FBGEMM / ours"]
    return _markdown(header, lines) + _source(XEON, "lookup")


def linear() -> str:
    """TTLinear beside nn.Linear: how many times less time."""
    rows = _select(_rows(EPYC, "linear"), provider="TTLinear", unit="ms")
    lines = []
    cases = dict.fromkeys(tuple(_frozen(row.shapes[name]) for name in ("batch", "in", "out", "ranks")) for row in rows)
    for batch, wide, out, ranks in cases:
        sizes = {"batch": batch, "in": wide, "out": out, "ranks": list(ranks)}
        passes = [_one(rows, pass_=name, **sizes).ratios["nn.Linear"] for name in ("forward", "forward+backward")]
        lines.append([f"{batch:,}", f"{wide} x {out}", " ".join(map(str, ranks)), *(f"{ratio:.1f}x" for ratio in passes)])
    return _markdown(["batch", "layer", "TT ranks", "forward", "forward and backward"], lines, left=0) + _source(EPYC, "linear")


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def transformer() -> str:
    """A training step of CoMERA's six-encoder transformer."""
    rows = _rows(EPYC, "transformer")
    names = {
        "dense": "dense, Adam",
        "GaLore": "dense, GaLore rank 128",
        "GaLore, 8-bit": "the same, 8-bit moments",
        "GaLore, layer-wise": "the same, updated in backward",
        "LTE": "dense, LTE, 4 heads of rank 32",
        "low rank": "linear layers of rank 30",
        "tensor train": "TT layers and embedding",
    }
    batches = list(dict.fromkeys(row.shapes["batch"] for row in rows))
    lines = []
    for provider, title in names.items():
        if not _select(rows, provider=provider):
            continue  # not measured on this machine
        ms = [_one(rows, provider=provider, unit="ms", batch=batch) for batch in batches]
        lines.append(
            [
                title,
                f"{ms[0].counted['params']:,.0f}",
                f"{_short(ms[0].counted['training_state_mib'])} MiB",
                *(f"{_short(row.p50 / 1000)} s" for row in ms),
            ]
        )
    header = ["", "parameters", "training state", *(f"batch {batch}" for batch in batches)]
    return _markdown(header, lines) + _source(EPYC, "transformer")


def sst2() -> str:
    """SST-2 from scratch."""
    return _markdown(*sst2_table(_rows(XEON, "sst2"))) + _source(XEON, "sst2", "sst2 --data FOLDER --threads 1")


def code() -> str:
    """Pre-training on code, dense and four times smaller."""
    return _markdown(*code_table(_rows(XEON, "code"))) + _source(XEON, "code", "code --threads 1")


def serve() -> str:
    """One call of a served model, beside tables of 8 bits."""
    rows = _rows(XEON, "serve")
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
        calls = [_one(rows, provider=provider, pass_="forward", batch=batch) for batch in batches]
        load = _select(rows, provider=provider, pass_="run", unit="ms")
        memory = _select(rows, provider=provider, pass_="run", unit="MiB")
        rest = (
            [f"{load[0].counted['bytes'] / 1e6:,.0f} MB", f"{load[0].p50:,.0f} ms", f"{memory[0].p50:,.0f} MiB"]
            if load
            else [""] * 3
        )
        lines.append([title, *(f"{row.p50:.2g} ms" if row.p50 < 10 else f"{row.p50:.1f} ms" for row in calls), *rest])
    header = ["median of a call", *(f"batch {batch:,}" for batch in batches), "file", "load", "memory"]
    return _markdown(header, lines) + _source(XEON, "serve")


def preprocess() -> str:
    """Whole runs of preprocessing, ours and the rivals'."""
    rows = _rows(EPYC_AVX2, "preprocess")
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
            ms, mib = (_select(rows, provider=provider, unit=unit, rows=size) for unit in ("ms", "MiB"))
            cells.append(f"{ms[0].p50 / 1000:.1f} s, {mib[0].p50:,.0f} MiB" if ms else "")
        lines.append(cells)
    return _markdown(["rows", *titles.values()], lines, left=0) + _source(EPYC_AVX2, "preprocess")


def preprocess_memory() -> str:
    """Peak memory of preprocessing beside its limit, by kinds of logs."""
    rows = _rows(EPYC_AVX2, "preprocess-memory")
    limits = sorted({row.shapes["limit_mib"] for row in rows})
    lines = []
    for log in sorted({row.shapes["log"] for row in rows}):
        of_log = {row.shapes["limit_mib"]: row for row in _select(rows, log=log)}
        first = next(iter(of_log.values()))
        peaks = [f"{of_log[limit].p50:,.0f} MiB" if limit in of_log else "" for limit in limits]
        lines.append([log, f"{first.shapes['rows']:,}", f"{first.counted['text_mib']:,.0f} MiB", *peaks])
    header = ["log", "rows", "text", *(f"peak at `--memory-limit {limit}MiB`" for limit in limits)]
    return _markdown(header, lines) + _source(EPYC_AVX2, "preprocess-memory")


def preprocess_formats() -> str:
    """Whole runs of preprocessing one log in several formats."""
    rows = _rows(XEON, "preprocess-formats")
    lines = [
        [row.provider, f"{row.p50 / 1000:.1f} s", f"{row.counted['rows_per_cpu_s']:,.0f}", f"{1 / row.ratios[TEXT]:.1f}"]
        for row in rows
    ]
    header = [f"{rows[0].shapes['rows']:,} rows of 40 columns", "time", "rows a CPU second", "times text's time"]
    return _markdown(header, lines) + _source(XEON, "preprocess-formats")


def gpu_static() -> str:
    """The modelled step on GPUs, ours and FBGEMM's."""
    rows = _rows(XEON, "gpu-static")
    lines = []
    for ours in _select(rows, provider="TT", unit="ms", rank=16):
        (fbgemm,) = _select(rows, provider="FBGEMM", unit="ms", **ours.shapes)
        gpu, batch, dim, _ = ours.shapes.values()
        times = [f"{row.p50:.2f}" for row in (ours, fbgemm)]
        memory = [f"{row.counted['mib']:.0f}" for row in (ours, fbgemm)]
        lines.append([gpu, f"{batch:,}", f"{dim}", *times, f"{fbgemm.p50 / ours.p50:.2f}x", *memory])
    titles = ["GPU", "batch", "dim", "TT ms", "FBGEMM ms", "FBGEMM's over TT's", "TT MiB", "FBGEMM MiB"]
    return _markdown(titles, lines) + _source(XEON, "gpu-static")


def trainer_loop() -> str:
    """Steps of the trainer on two processes, and of a loop by hand."""
    rows = _rows(XEON, "trainer-loop")
    providers = list(dict.fromkeys(row.provider for row in rows))
    forms = {"dense": "dense tables", "tt": "TT tables"}
    lines = [
        [title, *(f"{_select(rows, provider=provider, format=form)[0].p50:.0f} ms" for provider in providers)]
        for form, title in forms.items()
    ]
    return _markdown(["a step of 4,096 rows", *providers], lines) + _source(XEON, "trainer-loop")


def hot_rows() -> str:
    """TT tables of equal bytes with hot rows and without."""
    rows = _rows(XEON, "hot-rows")
    lines = []
    for compression in dict.fromkeys(row.shapes["compression"] for row in rows):
        step = [
            _one(rows, provider=name, pass_="step", compression=compression).p50
            for name in ("TT tables", "TT tables with hot rows")
        ]
        lines.append([f"{compression}x", *(f"{ms:.0f} ms" for ms in step), f"{step[1] / step[0]:.2f}x"])
    header = ["smaller", "TT tables", "with hot rows of equal bytes", "ratio"]
    return _markdown(header, lines, left=0) + _source(XEON, "hot-rows")


def distributed() -> str:
    """What a process sends in a step, and its time."""
    rows = _select(_rows(EPYC, "distributed"), processes=4)
    providers = list(dict.fromkeys(row.provider for row in rows))
    lines = []
    for batch in dict.fromkeys(row.shapes["batch"] for row in rows):
        cells = []
        for provider in providers:
            row = _one(rows, provider=provider, batch=batch)
            sent = sum(value for name, value in row.counted.items() if name.startswith("formula")) / 1024
            cells.append(f"{sent:,.0f} KiB, {row.p50:.0f} ms")
        lines.append([f"{batch:,}", *cells])
    return _markdown(["samples of a process", *providers], lines, left=0) + _source(EPYC, "distributed")


def scale_model() -> str:
    """Modelled milliseconds of a step of MLPerf's DLRM on many GPUs."""
    rows = _rows(EPYC, "scale-model")
    lines = []
    for gpus, batch in dict.fromkeys((row.shapes["gpus"], row.shapes["batch"]) for row in rows):
        case = _select(rows, gpus=gpus, batch=batch)
        dense = _select(case, provider="dense table-wise")[0]
        ours = [_one(case, provider="TT data-parallel", compression=size) for size in (500, 2000)]
        lines.append([str(gpus), f"{batch:,}", *(f"{row.p50:.1f}" for row in (dense, *ours))])
    header = ["GPUs", "samples of each", "dense table-wise", "TT data-parallel, 500x", "2,000x"]
    return (
        _markdown(header, lines, left=0)
        + f"\n\nModelled: `python -m benchmarks.run scale-model`, [rows](results/{EPYC}/scale-model.jsonl)."
    )


def mlperf() -> str:
    """A step of MLPerf's DLRM-DCNv2 at its own sizes, part by part, and its peak memory."""
    rows = _rows(XEON, "mlperf")
    types = list(dict.fromkeys(row.shapes["products"] for row in rows))
    parts = list(dict.fromkeys(row.provider for row in rows if row.unit == "ms"))
    lines = [[part, *(f"{_one(rows, provider=part, products=name).p50:,.0f} ms" for name in types)] for part in parts]
    whole = [_one(rows, provider="whole step", products=name) for name in types]
    lines.append(["samples a second", *(f"{1000 * row.shapes['batch'] / row.p50:,.0f}" for row in whole)])
    lines.append(["tables, dense", *(f"{row.counted['dense_gb']:.1f} GB" for row in whole)])
    lines.append(["tables, TT", *(f"{row.counted['table_mib']:.1f} MiB" for row in whole)])
    lines.append(["peak memory of the process", *(f"{row.counted['peak_mib'] / 1000 * 1.048576:.2f} GB" for row in whole)])
    return _markdown(["", *(f"products in {name}" for name in types)], lines) + _source(XEON, "mlperf")


def lookup_memory() -> str:
    """Peak extra memory of training a table of 100 million rows."""
    rows = _rows(XEON, "lookup-memory")
    lines = [
        [
            f"order {row.shapes['order']}, TT rank {row.shapes['rank']}",
            str(row.shapes["ids"]),
            f"{row.counted['dense_mib']:,.0f} MiB",
            f"{row.p50:.0f} MiB",
        ]
        for row in rows
    ]
    header = ["TT table", "ids", "the dense table", "cores, gradients, optimizer and a step"]
    return _markdown(header, lines, left=2) + _source(XEON, "lookup-memory")


TABLES: dict[str, Callable[[], str]] = {
    "whole-model": whole_model,
    "kaggle-model": kaggle_model,
    "equal-bytes": equal_bytes,
    "quality-ne": partial(quality, "ne"),
    "quality-auc": partial(quality, "auc"),
    "quality-val-ne": partial(quality, "val_ne", "video"),
    "quality-int8": quality_of_int8,
    "quality-splits": quality_of_splits,
    "lookup": lookup,
    "mlperf": mlperf,
    "lookup-memory": lookup_memory,
    "hot-rows": hot_rows,
    "linear": linear,
    "transformer": transformer,
    "sst2": sst2,
    "code": code,
    "serve": serve,
    "preprocess": preprocess,
    "preprocess-memory": preprocess_memory,
    "preprocess-formats": preprocess_formats,
    "trainer-loop": trainer_loop,
    "gpu-static": gpu_static,
    "distributed": distributed,
    "scale-model": scale_model,
}
