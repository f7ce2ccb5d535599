"""Tables of lookups in TT tables."""

from __future__ import annotations

from benchmarks.harness.rows import one, select
from benchmarks.page_tables.rows import EPYC_AVX2, EPYC_AVX512, OURS, XEON, committed, markdown, source


def lookup() -> str:
    """A training step over the seven largest tables of Criteo-Kaggle."""
    return _lookup(XEON)


def lookup_of_avx2() -> str:
    """The same on a machine without AVX-512."""
    return _lookup(EPYC_AVX2)


def _lookup(machine: str) -> str:
    rows = select(committed(machine, "lookup"), batch=16384, dim=64)
    columns = {
        "nn.EmbeddingBag sparse": "`nn.EmbeddingBag`",
        "FBGEMM": "FBGEMM",
        "TTM no dedup": "TT without dedup",
        "TTM row dedup": "TT, unique rows",
        OURS: "ours",
    }
    lines = []
    for order, rank in dict.fromkeys((row.shapes["order"], row.shapes["rank"]) for row in rows):
        case = select(rows, order=order, rank=rank, pass_="step")
        ms = {name: one(case, provider=name, unit="ms") for name in columns}
        extra = [one(case, provider=name, unit="MiB").p50 for name in ("FBGEMM", OURS)]
        lines.append(
            [
                f"order {order}, TT rank {rank}",
                f"{one(case, provider=OURS, unit='ms').counted['compression']:,.0f}x",
                *(f"{row.p50:,.1f}" for row in ms.values()),
                f"{ms[OURS].p50 / ms['FBGEMM'].p50:.2f}x",
                f"{extra[0]:.0f} / {extra[1]:.0f} MiB",
            ]
        )
    header = ["TT tables", "smaller", *columns.values(), "of FBGEMM's", "extra memory, FBGEMM / ours"]
    return markdown(header, lines) + source(machine, "lookup")


def lookup_memory() -> str:
    """Peak extra memory of training a table of 100 million rows."""
    rows = committed(XEON, "lookup-memory")
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
    return markdown(header, lines, left=2) + source(XEON, "lookup-memory")


def hot_rows() -> str:
    """TT tables of equal bytes, with and without hot rows."""
    rows = committed(EPYC_AVX512, "hot-rows")
    lines = []
    for compression in dict.fromkeys(row.shapes["compression"] for row in rows):
        step = [
            one(rows, provider=name, pass_="step", compression=compression).p50 for name in ("TT tables", "TT tables with hot rows")
        ]
        lines.append([f"{compression}x", *(f"{ms:.0f} ms" for ms in step), f"{step[1] / step[0]:.2f}x"])
    header = ["smaller", "TT tables", "with hot rows of equal bytes", "ratio"]
    return markdown(header, lines, left=0) + source(EPYC_AVX512, "hot-rows")


def gpu_static() -> str:
    """The modeled step on GPUs, ours and FBGEMM's."""
    rows = committed(EPYC_AVX2, "gpu-static")
    lines = []
    for ours in select(rows, provider="TT", unit="ms", rank=16):
        (row_wise,), (adagrad,) = (select(rows, provider=name, unit="ms", **ours.shapes) for name in ("FBGEMM", "FBGEMM, Adagrad"))
        gpu, batch, dim, _ = ours.shapes.values()
        times = [f"{row.p50:.3f}" for row in (ours, row_wise, adagrad)]
        ratios = [f"{row.p50 / ours.p50:.2f}x" for row in (row_wise, adagrad)]
        lines.append([gpu, f"{batch:,}", f"{dim}", *times, *ratios])
    titles = [
        "GPU",
        "batch",
        "dim",
        "TT, Adagrad ms",
        "FBGEMM, row-wise ms",
        "FBGEMM, Adagrad ms",
        "row-wise over TT",
        "Adagrad over TT",
    ]
    return markdown(titles, lines) + source(EPYC_AVX2, "gpu-static")
