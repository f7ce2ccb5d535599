"""The tables of README and docs, made from the rows under results/: one function per table, from rows to Markdown."""

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from statistics import mean, median, stdev

from benchmarks.harness.rows import Row, one, read_rows, select, short
from benchmarks.harness.trainings import at_best_rate

RESULTS = Path(__file__).parent / "results"
H100 = "nvidia-h100-80gb-hbm3"
XEON, EPYC = "cpu-2-intel-xeon-processor-avx512", "cpu-2-amd-epyc"
EPYC_AVX2, EPYC_AVX512 = "cpu-2-amd-epyc-avx2", "cpu-2-amd-epyc-avx512"
MACHINES = {
    H100: "One NVIDIA H100",
    XEON: "2 cores of an Intel Xeon with AVX-512",
    EPYC: "2 cores of an AMD EPYC",
    EPYC_AVX2: "2 cores of an AMD EPYC with AVX2",
    EPYC_AVX512: "2 cores of an AMD EPYC with AVX-512",
}
OURS = "TTEmbeddingBagCollection, updated in backward"
DAYS = {"continued": "continued", "anew": "anew, on all days", "first day's": "the first day's model"}
ORDERS = {"comera-rec": "by frequency", "comera-rec, by similarity": "by similarity"}


@cache
def committed(machine: str, benchmark: str) -> list[Row]:
    return read_rows(RESULTS / machine / f"{benchmark}.jsonl")


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Format a table whose first `left` columns are flush left."""
    rule = ["---"] * left + ["---:"] * (len(header) - left)
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *lines))


def source(machine: str, benchmark: str, command: str = "") -> str:
    """Format the line below a table: hardware, versions, the command, and a link to its rows."""
    versions = sorted({row.versions["torch"] for row in committed(machine, benchmark)})
    return (
        f"\n\n{MACHINES[machine]} (virtual), torch {', '.join(versions)}; "
        f"`python -m benchmarks.run {command or benchmark}`, [rows](results/{machine}/{benchmark}.jsonl)."
    )


def spread(values: Sequence[float], digits: int = 4) -> str:
    """Format mean and standard deviation, or a single value."""
    return f"{mean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")


def lookup(machine: str) -> str:
    """A training step over the seven largest tables of Criteo-Kaggle."""
    columns = {
        "nn.EmbeddingBag sparse": "`nn.EmbeddingBag`", "FBGEMM": "FBGEMM", "TTM no dedup": "TT without dedup",
        "TTM row dedup": "TT, unique rows", OURS: "ours",
    }  # fmt: skip
    rows = select(committed(machine, "lookup"), batch=16384, dim=64, pass_="step")
    lines = []
    for order, rank in dict.fromkeys((row.shapes["order"], row.shapes["rank"]) for row in rows):
        ms, smaller, memory = _lookup_case(select(rows, order=order, rank=rank), columns)
        cells = [f"order {order}, TT rank {rank}", smaller, *(f"{each:,.1f}" for each in ms.values())]
        lines.append([*cells, f"{ms[OURS] / ms['FBGEMM']:.2f}x", memory])
    header = ["TT tables", "smaller", *columns.values(), "of FBGEMM's", "extra memory, FBGEMM / ours"]
    return markdown(header, lines) + source(machine, "lookup")


def _lookup_case(case: Sequence[Row], providers: Iterable[str]) -> tuple[dict[str, float], str, str]:
    """Return times of providers, the compression, and what FBGEMM's step and ours add to memory."""
    ms = {name: one(case, provider=name, unit="ms").p50 for name in providers}
    fbgemm, ours = (one(case, provider=name, unit="MiB") for name in ("FBGEMM", OURS))
    return ms, f"{ours.counted['compression']:,.0f}x", f"{fbgemm.p50:.0f} / {ours.p50:.0f} MiB"


def lookup_by_batch() -> str:
    """The same step by batch and TT rank, beside FBGEMM's."""
    rows = select(committed(EPYC_AVX512, "lookup"), dim=64, order=2, pass_="step", unit="ms")
    lines = []
    for batch in (512, 2048, 16384):
        pairs = [[one(rows, batch=batch, rank=rank, provider=name).p50 for name in ("FBGEMM", OURS)] for rank in (8, 16, 32)]
        lines.append([f"{batch:,}", *(f"{tt:.2f} / {fbgemm:.2f} ms, {tt / fbgemm:.2f}x" for fbgemm, tt in pairs)])
    header = ["rows in a batch", *(f"TT rank {rank}: ours / FBGEMM's" for rank in (8, 16, 32))]
    return markdown(header, lines) + source(EPYC_AVX512, "lookup", "lookup --only batch=BATCH,order=2,dim=64")


def lookup_on_gpu() -> str:
    """The same step on a GPU, with updates in backward, eager and in a CUDA graph."""
    columns = {"FBGEMM": "FBGEMM, eager", OURS: "ours, eager", "FBGEMM, CUDA graph": "FBGEMM, graph"}
    columns |= {"TT tables, row-wise Adagrad, CUDA graph": "ours, graph", "TT tables, Adagrad, CUDA graph": "ours, Adagrad, graph"}
    rows = select(committed(H100, "lookup"), pass_="step", order=2)
    lines = []
    for dim, rank, batch in dict.fromkeys((row.shapes["dim"], row.shapes["rank"], row.shapes["batch"]) for row in rows):
        ms, smaller, memory = _lookup_case(select(rows, dim=dim, rank=rank, batch=batch), columns)
        lines.append([f"{dim}", f"{rank}", f"{batch:,}", smaller, *(f"{each:.2f}" for each in ms.values()), memory])
    header = ["dim", "TT rank", "batch", "smaller", *columns.values(), "extra memory, FBGEMM / ours"]
    return markdown(header, lines, left=0) + source(H100, "lookup", "lookup --device cuda --seconds 0.25")


def linear() -> str:
    """How many times faster TTLinear is than nn.Linear."""
    rows = select(committed(EPYC_AVX512, "linear"), provider="TTLinear", unit="ms")
    lines = []
    for forward in select(rows, pass_="forward"):
        sizes = forward.shapes
        ratios = [row.ratios["nn.Linear"] for row in (forward, one(rows, pass_="forward+backward", **sizes))]
        layer = [f"{sizes['batch']:,}", f"{sizes['in']} x {sizes['out']}", " ".join(map(str, sizes["ranks"]))]
        lines.append([*layer, *(f"{ratio:.1f}x" for ratio in ratios)])
    header = ["batch", "layer", "TT ranks", "forward", "forward and backward"]
    return markdown(header, lines, left=0) + source(EPYC_AVX512, "linear")


def transformer() -> str:
    """A training step of CoMERA's six-encoder transformer."""
    rows = committed(EPYC_AVX512, "transformer")
    names = {"dense": "dense, Adam", "low rank": "linear layers of rank 30", "tensor train": "TT layers and embedding"}
    batches = list(dict.fromkeys(row.shapes["batch"] for row in rows))
    lines = []
    for provider, title in names.items():
        ms = [one(rows, provider=provider, unit="ms", batch=batch) for batch in batches]
        sizes = [f"{ms[0].counted['params']:,.0f}", f"{short(ms[0].counted['training_state_mib'])} MiB"]
        lines.append([title, *sizes, *(f"{short(row.p50 / 1000)} s" for row in ms)])
    header = ["", "parameters", "training state", *(f"batch {batch}" for batch in batches)]
    return markdown(header, lines) + source(EPYC_AVX512, "transformer")


def serve() -> str:
    """One call of a served model, compared with 8-bit tables."""
    rows = committed(EPYC_AVX512, "serve")
    names = {
        "fast int8": "`--form fast --dtype int8`", "fast float32": "`--form fast`", "portable float32": "`--form portable`",
        "dense int8, AOTInductor": "dense int8, compiled by AOTInductor",
    }  # fmt: skip
    batches = list(dict.fromkeys(row.shapes["batch"] for row in rows))
    lines = []
    for provider, title in names.items():
        calls = [one(rows, provider=provider, pass_="forward", batch=batch).p50 for batch in batches]
        cells = [f"{ms:.2g} ms" if ms < 10 else f"{ms:.1f} ms" for ms in calls]
        load, memory = (one(rows, provider=provider, pass_="run", unit=unit) for unit in ("ms", "MiB"))
        size = f"{load.counted['bytes'] / 1e6:,.0f} MB"
        lines.append([title, *cells, size, f"{load.p50:,.0f} ms", f"{memory.p50:,.0f} MiB"])
    header = ["median of a call", *(f"batch {batch:,}" for batch in batches), "file", "load", "memory"]
    return markdown(header, lines) + source(EPYC_AVX512, "serve")


def serve_http() -> str:
    """One-row requests over HTTP."""
    rows = committed(EPYC_AVX512, "serve-http")
    names = {"comera serve": "`comera serve`", "uvicorn, Starlette": "the same model by a handler of Starlette", "echo": "an echo"}
    lines = [
        [title, f"{row.counted['requests_per_s']:,.0f}", f"{row.p50:.1f} ms", f"{row.counted['p99']:.1f} ms"]
        for name, title in names.items()
        for row in select(rows, provider=name)
    ]
    header = ["one-row requests, 32 connections", "a second", "median", "99th percentile"]
    return markdown(header, lines) + source(EPYC_AVX512, "serve-http")


def preprocess(machine: str) -> str:
    """Whole preprocessing runs, ours and the rivals'."""
    rows = [row for row in committed(machine, "preprocess") if "groups" not in row.shapes]
    titles = {"comera-rec": "`comera preprocess`", "duckdb": "SQL for DuckDB", "pandas": "pandas script"}
    titles |= {"torchrec": "torchrec's functions"}
    lines = []
    for size in sorted({row.shapes["rows"] for row in rows}):
        cells = [f"{size:,}"]
        for provider in titles:
            ms, mib = (select(rows, provider=provider, unit=unit, rows=size) for unit in ("ms", "MiB"))
            cells.append(f"{ms[0].p50 / 1000:.1f} s, {mib[0].p50:,.0f} MiB" if ms else "")
        lines.append(cells)
    return markdown(["rows", *titles.values()], lines, left=0) + source(machine, "preprocess")


def preprocess_by_order() -> str:
    """Whole preprocessing runs over logs with groups, in both orders of ids."""
    rows = select(committed(EPYC_AVX512, "preprocess"), groups=0.5)
    lines = []
    for size in sorted({row.shapes["rows"] for row in rows}):
        pairs = [[one(rows, provider=name, unit=unit, rows=size).p50 for unit in ("ms", "MiB")] for name in ORDERS]
        lines.append([f"{size:,}", *(f"{ms / 1000:.1f} s, {mib:,.0f} MiB" for ms, mib in pairs)])
    command = "preprocess --only groups=0.5"
    return markdown(["rows", *ORDERS.values()], lines, left=0) + source(EPYC_AVX512, "preprocess", command)


def days() -> str:
    """Daily retraining: NE and AUC on the next day's rows, and the steps of the day's run."""
    rows = committed(EPYC_AVX512, "days")
    lines = []
    for day in sorted({row.shapes["day"] for row in rows}):
        cells = [f"{day}"]
        for provider in DAYS:
            of = select(rows, day=day, provider=provider)
            steps = f", {of[0].counted['steps']:,.0f} steps" if of and provider != "first day's" else ""
            cells.append(f"{of[0].p50:.4f}, {of[0].counted['auc']:.4f}{steps}" if of else "")
        lines.append(cells)
    return markdown(["after day", *DAYS.values()], lines) + source(EPYC_AVX512, "days")


def whole_model() -> str:
    """The DLRM of ten million rows, dense and made smaller as a whole: size, memory, time and quality."""
    rows = at_best_rate(select(committed(EPYC_AVX512, "dlrm"), data="synth-10M"))
    compressed = select(rows, provider="TT + rows adaptive")
    forms = {"dense": select(rows, provider="dense")}
    for compression in sorted({row.shapes["compression"] for row in compressed}):
        forms[f"{compression:,}x smaller"] = select(compressed, compression=compression)
    lines = []
    for title, form in forms.items():
        counted = {name: [row.counted[name] for row in form] for name in ("params", "bytes", "peak_mib", "step_ms", "auc")}
        size = [f"{counted['params'][0]:,.0f}", f"{short(counted['bytes'][0] / 2**20)} MiB"]
        cost = [f"{median(counted['peak_mib']):,.0f} MiB", f"{median(counted['step_ms']):.0f} ms"]
        lines.append([title, *size, *cost, spread([row.p50 for row in form]), f"{mean(counted['auc']):.4f}"])
    lines.append(_best_possible(rows[0], columns=4))
    header = ["", "parameters", "model", "peak memory", "a step", "NE", "AUC"]
    return markdown(header, lines) + source(EPYC_AVX512, "dlrm", "dlrm --only data=synth-10M")


def kaggle_model() -> str:
    """The DLRM of a million rows, 99 times smaller, dense, TT, and TT with hot rows."""
    rows = at_best_rate(select([*committed(EPYC, "dlrm"), *committed(EPYC_AVX512, "dlrm")], data="synth"))
    lines = []
    for title, provider in {"dense": "dense", "TT": "TT adaptive", "TT with hot rows": "TT + rows adaptive"}.items():
        best = select(rows, provider=provider)
        auc = mean(row.counted["auc"] for row in best)
        lines.append([title, f"{best[0].counted['params']:,.0f}", spread([row.p50 for row in best]), f"{auc:.4f}"])
    lines.append(_best_possible(rows[0], columns=1))
    return markdown(["", "parameters", "NE", "AUC"], lines) + source(EPYC, "dlrm") + source(EPYC_AVX512, "dlrm")


def _best_possible(row: Row, columns: int) -> list[str]:
    scores = [f"{row.counted[name]:.4f}" for name in ("best_ne", "best_auc")]
    return ["the best that any model can reach", *[""] * columns, *scores]


def step() -> str:
    """The parts of a step of Criteo-Kaggle's DLRM, dense and TT, at each batch size."""
    rows = select(committed(EPYC_AVX512, "step"), model="kaggle")
    batches = sorted({row.shapes["batch"] for row in rows})
    columns = [(batch, form) for batch in batches for form in ("dense", "TT")]
    lines = []
    for part in dict.fromkeys(row.shapes["part"] for row in rows):
        lines.append([part, *(f"{one(rows, provider=form, batch=batch, part=part).p50:.1f} ms" for batch, form in columns)])
    header = ["", *(f"{form}, batch {batch:,}" for batch, form in columns)]
    return markdown(header, lines) + source(EPYC_AVX512, "step", "step --only model=kaggle")


def mlperf() -> str:
    """A step of MLPerf's DLRM-DCNv2 at its original sizes, part by part, and its peak memory."""
    rows = select(committed(EPYC_AVX512, "step"), model="mlperf")
    kinds = list(dict.fromkeys(row.shapes["products"] for row in rows))
    timed = select(rows, unit="ms")
    lines = [
        [part, *(f"{one(timed, products=kind, part=part).p50:,.0f} ms" for kind in kinds)]
        for part in dict.fromkeys(row.shapes["part"] for row in timed)
    ]
    whole = [one(timed, products=kind, part="whole step") for kind in kinds]
    lines.append(["samples a second", *(f"{1000 * row.shapes['batch'] / row.p50:,.0f}" for row in whole)])
    lines.append(["the model, dense", *(f"{row.counted['dense_gb']:.1f} GB" for row in whole)])
    lines.append(["tables, TT", *(f"{row.counted['table_mib']:.1f} MiB" for row in whole)])
    peaks = [one(rows, products=kind, unit="MiB") for kind in kinds]
    lines.append(["peak memory of the process", *(f"{row.p50 / 1000 * 1.048576:.2f} GB" for row in peaks)])
    header = ["", *(f"products in {kind}" for kind in kinds)]
    return markdown(header, lines) + source(EPYC_AVX512, "step", "step --only model=mlperf")
