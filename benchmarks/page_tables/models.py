"""Tables of whole models: their quality, cost, and distribution over processes."""

from __future__ import annotations

from statistics import mean, median

from benchmarks.harness.rows import Row, one, select
from benchmarks.harness.text import short
from benchmarks.harness.trainings import at_best_rate
from benchmarks.page_tables.rows import (
    EPYC,
    EPYC_AVX2,
    EPYC_AVX512,
    XEON,
    committed,
    markdown,
    source,
    spread,
)  # fmt: skip
from benchmarks.training.dlrm import ARCHITECTURES


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
        lines.append(
            [
                title,
                f"{counted['params'][0]:,.0f}",
                f"{short(counted['bytes'][0] / 2**20)} MiB",
                f"{median(counted['peak_mib']):,.0f} MiB",
                f"{median(counted['step_ms']):.0f} ms",
                spread([row.p50 for row in form]),
                f"{mean(counted['auc']):.4f}",
            ]
        )
    lines.append(
        ["the best that any model can reach", *[""] * 4, *(f"{rows[0].counted[name]:.4f}" for name in ("best_ne", "best_auc"))]
    )
    header = ["", "parameters", "model", "peak memory", "a step", "NE", "AUC"]
    return markdown(header, lines) + source(EPYC_AVX512, "dlrm", "dlrm --only data=synth-10M")


def kaggle_model() -> str:
    """The DLRM of a million rows, 99 times smaller, dense, TT, and TT with hot rows."""
    rows = at_best_rate(select([*committed(EPYC, "dlrm"), *committed(EPYC_AVX512, "dlrm")], data="synth"))
    lines = []
    for title, provider in {"dense": "dense", "TT": "TT adaptive", "TT with hot rows": "TT + rows adaptive"}.items():
        best = select(rows, provider=provider)
        lines.append(
            [
                title,
                f"{best[0].counted['params']:,.0f}",
                spread([row.p50 for row in best]),
                f"{mean(row.counted['auc'] for row in best):.4f}",
            ]
        )
    lines.append(["the best that any model can reach", "", *(f"{rows[0].counted[name]:.4f}" for name in ("best_ne", "best_auc"))])
    return markdown(["", "parameters", "NE", "AUC"], lines) + source(EPYC, "dlrm") + source(EPYC_AVX512, "dlrm")


def architectures() -> str:
    """Architectures on the demo's logs, dense and with tables 50 times smaller."""
    machines = EPYC_AVX2, EPYC_AVX512
    rows = at_best_rate(select([row for machine in machines for row in committed(machine, "dlrm")], data="demo"))
    lines = []
    for name in ARCHITECTURES:
        forms = [select(rows, provider=f"{name} {form}") for form in ("dense", "TT + rows")]
        values = [[row.p50 for row in form] for form in forms] + [[row.counted["auc"] for row in form] for form in forms]
        sizes = [f"{form[0].counted['bytes'] / 2**20:,.1f} MiB" for form in forms]
        lines.append([name, *sizes, *(f"{mean(each):.4f}" for each in values)])
    header = ["", "dense", "TT with hot rows", "NE, dense", "NE, TT", "AUC, dense", "AUC, TT"]
    return markdown(header, lines) + "".join(source(machine, "dlrm", "dlrm --only data=demo") for machine in machines)


def trainer_loop() -> str:
    """Steps of the trainer and of a hand-written loop, on two processes."""
    rows = committed(EPYC_AVX2, "trainer-loop")
    providers = list(dict.fromkeys(row.provider for row in rows))
    forms = {"dense": "dense tables", "tt": "TT tables"}
    lines = [
        [title, *(f"{select(rows, provider=provider, format=form)[0].p50:.0f} ms" for provider in providers)]
        for form, title in forms.items()
    ]
    return markdown(["a step of 4,096 rows", *providers], lines) + source(EPYC_AVX2, "trainer-loop")


def distributed() -> str:
    """What a process sends in a step, and the step's time."""
    rows = select(committed(EPYC, "distributed"), processes=4)
    providers = list(dict.fromkeys(row.provider for row in rows))
    lines = []
    for batch in dict.fromkeys(row.shapes["batch"] for row in rows):
        cells = []
        for provider in providers:
            row = one(rows, provider=provider, batch=batch)
            sent = sum(value for name, value in row.counted.items() if name.startswith("formula")) / 1024
            cells.append(f"{sent:,.0f} KiB, {row.p50:.0f} ms")
        lines.append([f"{batch:,}", *cells])
    return markdown(["samples of a process", *providers], lines, left=0) + source(EPYC, "distributed")


def planned() -> str:
    """The planner's estimates for a TT table on several processes, and measurements."""
    rows = committed(EPYC_AVX2, "planned")
    lines = []
    for memory in select(rows, unit="MiB"):
        sizes = memory.shapes
        time = one(rows, provider=memory.provider, unit="ms", **sizes)
        cells = [str(sizes["processes"]), f"{sizes['rank']}, {sizes['batch']:,}", memory.provider]
        for row, unit, expected in ((memory, "MiB", memory.counted["planned_mib"]), (time, "ms", time.counted["planned_ms"])):
            cells += [f"{row.p50:,.0f} {unit}", f"{expected / row.p50:.2f}x"]
        lines.append(cells)
    header = ["processes", "rank, batch", "sharding", "memory", "expected", "step", "expected"]
    return markdown(header, lines, left=3) + source(EPYC_AVX2, "planned")


def scale_model() -> str:
    """Modeled milliseconds of a step of MLPerf's DLRM on many GPUs."""
    rows = committed(EPYC, "scale-model")
    lines = []
    for gpus, batch in dict.fromkeys((row.shapes["gpus"], row.shapes["batch"]) for row in rows):
        case = select(rows, gpus=gpus, batch=batch)
        dense = select(case, provider="dense table-wise")[0]
        ours = [one(case, provider="TT data-parallel", compression=size) for size in (500, 2000)]
        lines.append([str(gpus), f"{batch:,}", *(f"{row.p50:.1f}" for row in (dense, *ours))])
    header = ["GPUs", "samples of each", "dense table-wise", "TT data-parallel, 500x", "2,000x"]
    return (
        markdown(header, lines, left=0)
        + f"\n\nModeled: `python -m benchmarks.run scale-model`, [rows](results/{EPYC}/scale-model.jsonl)."
    )


def mlperf() -> str:
    """A step of MLPerf's DLRM-DCNv2 at its original sizes, part by part, and its peak memory."""
    runs: dict[str, list[Row]] = {}  # by column
    for machine, name in ((XEON, "AVX-512"), (EPYC_AVX2, "AVX2")):
        rows = committed(machine, "mlperf")
        runs |= {
            f"{name}, products in {kind}": select(rows, products=kind)
            for kind in dict.fromkeys(row.shapes["products"] for row in rows)
        }
    parts = dict.fromkeys(row.provider for rows in runs.values() for row in rows if row.unit == "ms")
    lines = [[part, *(f"{one(rows, provider=part).p50:,.0f} ms" for rows in runs.values())] for part in parts]
    whole = [one(rows, provider="whole step") for rows in runs.values()]
    lines.append(["samples a second", *(f"{1000 * row.shapes['batch'] / row.p50:,.0f}" for row in whole)])
    lines.append(["tables, dense", *(f"{row.counted['dense_gb']:.1f} GB" for row in whole)])
    lines.append(["tables, TT", *(f"{row.counted['table_mib']:.1f} MiB" for row in whole)])
    lines.append(["peak memory of the process", *(f"{row.counted['peak_mib'] / 1000 * 1.048576:.2f} GB" for row in whole)])
    return markdown(["", *runs], lines) + source(XEON, "mlperf") + source(EPYC_AVX2, "mlperf")
