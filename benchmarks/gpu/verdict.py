"""The page that `benchmarks.gpu` prints at the end: goals and what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness.environment import FOLDER
from benchmarks.harness.rows import Row, read_rows
from benchmarks.harness.text import aligned


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A ratio of two providers' times that all rows of the given sizes should reach."""

    what: str
    step: str
    provider: str
    baseline: str
    pass_: str
    least: float
    """Smallest acceptable ratio; above 1 is faster than the baseline."""
    sizes: Mapping[str, Any] = field(default_factory=dict)


GOALS = (
    Goal(what="lookup, CUDA graph, beside FBGEMM", step="gpu-lookup", provider="TT tables, CUDA graph", baseline="FBGEMM",
         pass_="step", least=1.0, sizes={"order": 2}),
    Goal(what="lookup, CUDA graph, beside nn.EmbeddingBag", step="gpu-lookup", provider="TT tables, CUDA graph",
         baseline="nn.EmbeddingBag sparse", pass_="step", least=1.0, sizes={"order": 2}),
    Goal(what="lookup, eager, beside nn.EmbeddingBag", step="gpu-lookup", provider="TT tables", baseline="nn.EmbeddingBag sparse",
         pass_="step", least=1.0, sizes={"order": 2}),
    Goal(what="TTLinear 1024 x 1024, rank 64, batch 16,384", step="linear", provider="TTLinear", baseline="nn.Linear",
         pass_="forward+backward", least=4.0, sizes={"batch": 16384, "rank": 64}),
    Goal(what="float8 beside bfloat16, 4096 wide", step="float8", provider="float8", baseline="bfloat16", pass_="forward+backward",
         least=1.0, sizes={"n": 4096}),
    Goal(what="transformer, whole step", step="transformer", provider="tensor train", baseline="dense", pass_="step", least=2.0),
    Goal(what="DLRM, whole step, beside dense", step="gpu-dlrm", provider="TT, CUDA graph", baseline="dense", pass_="step",
         least=1.0),
    Goal(what="DLRM, graph beside eager", step="gpu-dlrm", provider="TT, CUDA graph", baseline="TT", pass_="step", least=1.0),
)  # fmt: skip


def verdict(rows: Sequence[Row], notes: Mapping[str, str], machine: str) -> str:
    """Format a line for each goal: the smallest ratio measured and whether it meets the goal, or why it wasn't measured."""
    cells = [["goal", "at least", "measured", ""]]
    for goal in GOALS:
        ratios = [row.ratios[goal.baseline] for row in rows if _fits(row, goal)]
        if ratios:
            outcome = f"{min(ratios):.2f}x", "met" if min(ratios) >= goal.least else "missed"
        else:
            outcome = "", f"not measured ({goal.step}: {notes.get(goal.step, 'no such case')})"
        cells.append([goal.what, f"{goal.least:.1f}x", *outcome])
    return "\n".join(
        [
            f"verdict on {machine}: smallest ratios over all sizes, above 1 is faster",
            *aligned(cells, left=(0, 3)),
            *_model(rows, machine),
        ]
    )


def _fits(row: Row, goal: Goal) -> bool:
    ranks = row.shapes.get("ranks")
    sizes = {**row.shapes, **({"rank": max(ranks)} if ranks else {})}
    return (
        (row.op, row.provider, row.pass_, row.unit) == (goal.step, goal.provider, goal.pass_, "ms")
        and goal.baseline in row.ratios
        and all(sizes.get(name) == size for name, size in goal.sizes.items())
    )


def _model(rows: Sequence[Row], machine: str) -> list[str]:
    """Format what `gpu-static` predicted for this GPU and what was measured."""
    said = {
        (row.shapes["batch"], row.shapes["dim"], row.shapes["rank"], row.provider): row.p50
        for path in sorted((FOLDER / "results").glob("*/gpu-static.jsonl"))
        for row in read_rows(path)
        if row.shapes["gpu"].lower() in machine.split("-")
    }
    names = {"TT tables, CUDA graph": "TT", "FBGEMM": "FBGEMM"}
    lines = []
    for row in rows:
        key = (row.shapes.get("batch"), row.shapes.get("dim"), row.shapes.get("rank"), names.get(row.provider))
        if row.op == "gpu-lookup" and row.pass_ == "step" and row.shapes["order"] == 2 and key in said:
            lines.append(f"  model: {row.provider}, batch {key[0]}, dim {key[1]}: {said[key]:.3f} ms said, {row.p50:.3f} measured")
    return lines
