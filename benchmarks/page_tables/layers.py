"""Tables of linear layers and of the models trained with them."""

from __future__ import annotations

from benchmarks.page_tables.rows import EPYC, EPYC_AVX512, XEON, committed, frozen, markdown, one, select, short, source
from benchmarks.text.summary import code_table, sst2_table


def linear() -> str:
    """How many times faster TTLinear is than nn.Linear."""
    rows = select(committed(EPYC, "linear"), provider="TTLinear", unit="ms")
    lines = []
    cases = dict.fromkeys(tuple(frozen(row.shapes[name]) for name in ("batch", "in", "out", "ranks")) for row in rows)
    for batch, wide, out, ranks in cases:
        sizes = {"batch": batch, "in": wide, "out": out, "ranks": list(ranks)}
        passes = [one(rows, pass_=name, **sizes).ratios["nn.Linear"] for name in ("forward", "forward+backward")]
        lines.append([f"{batch:,}", f"{wide} x {out}", " ".join(map(str, ranks)), *(f"{ratio:.1f}x" for ratio in passes)])
    return markdown(["batch", "layer", "TT ranks", "forward", "forward and backward"], lines, left=0) + source(EPYC, "linear")


def transformer() -> str:
    """A training step of CoMERA's six-encoder transformer."""
    rows = committed(EPYC_AVX512, "transformer")
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
        if not select(rows, provider=provider):
            continue  # not measured on this machine
        ms = [one(rows, provider=provider, unit="ms", batch=batch) for batch in batches]
        lines.append(
            [
                title,
                f"{ms[0].counted['params']:,.0f}",
                f"{short(ms[0].counted['training_state_mib'])} MiB",
                *(f"{short(row.p50 / 1000)} s" for row in ms),
            ]
        )
    header = ["", "parameters", "training state", *(f"batch {batch}" for batch in batches)]
    return markdown(header, lines) + source(EPYC_AVX512, "transformer")


def sst2() -> str:
    """SST-2 trained from scratch."""
    return markdown(*sst2_table(committed(XEON, "sst2"))) + source(XEON, "sst2", "sst2 --data FOLDER --threads 1")


def code() -> str:
    """Pre-training on code, dense and four times smaller."""
    return markdown(*code_table(committed(XEON, "code"))) + source(XEON, "code", "code --threads 1")
