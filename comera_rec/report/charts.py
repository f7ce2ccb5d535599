"""The report's drawings: matplotlib figures as inline SVG, colored by the page's CSS variables so that they follow its theme."""

import io
import re
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from comera_rec.report.runs import COLORS, Run, short_name

# Colors that stand for CSS variables until the SVG is written; none of them is shown.
INK, MUTED, LINE = "#010101", "#020202", "#030303"
SERIES = tuple(f"#0400{i:02x}" for i in range(COLORS))
_VARIABLES = {INK: "--ink", MUTED: "--muted", LINE: "--line"} | {color: f"--series-{i}" for i, color in enumerate(SERIES)}

_STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": 10,
    "font.family": "sans-serif",
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "grid.color": LINE,
    "grid.linewidth": 0.8,
    "lines.linewidth": 2.0,
    "text.color": INK,
    "text.parse_math": False,  # names of runs and columns may hold a $
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    **{f"{axis}tick.{kind}.size": 0 for axis in "xy" for kind in ("major", "minor")},
}


def curves(runs: list[Run], *, best_auc: float | None) -> list[tuple[str, str]]:
    """Draw loss, validation NE and AUC, time, memory and size over steps, as (title, SVG); skip those that no run has."""
    panels = [
        ("Training loss, smoothed", "train", "loss"),
        ("Validation NE, lower is better", "val", "ne"),
        (f"Validation AUC, higher is better{'; dashed: best possible' if best_auc else ''}", "val", "auc"),
        ("Milliseconds per step, smoothed", "train", "step_ms"),
        ("Peak memory in MiB, smoothed", "train", "memory_mib"),
        ("Parameters of TT modules; dashed: target", "ranks", "params"),
    ]
    drawn = [(title, _curve(runs, kind, key, best_auc if key == "auc" else None)) for title, kind, key in panels]
    return [(title, svg) for title, svg in drawn if svg]


@matplotlib.rc_context(_STYLE)
def _curve(runs: list[Run], kind: str, key: str, reference: float | None) -> str:
    figure, axes = _figure(6.4, 3.2)
    shown = [] if reference is None else [reference]
    dashed: Any = {"linewidth": 1.2, "linestyle": (0, (4, 3))}
    for run in runs:
        lines = [line for line in getattr(run, kind) if line.get(key) is not None and np.isfinite(line[key])]
        if not lines or (kind == "ranks" and len(lines) == 1):  # a size that never changes
            continue
        color, steps, values = SERIES[run.color], [line["step"] for line in lines], np.array([line[key] for line in lines])
        # The first steps' losses are many times larger than the rest; drawn to scale, they would flatten the curves.
        shown += list(values[len(values) // 10 if kind == "train" else 0 :])
        if kind == "train":
            axes.plot(steps, values, color=color, alpha=0.2, linewidth=1)
            axes.plot(steps, _smooth(values), color=color)
        elif kind == "val":
            axes.plot(steps, values, color=color, marker="o", markersize=4)
        else:
            axes.step([*steps, max(run.step, steps[-1])], [*values, values[-1]], where="post", color=color)
            shown.append(0)
            if target := lines[-1].get("target_params"):
                axes.axhline(target, color=color, **dashed)
    if not axes.lines:
        return ""
    margin = 0.06 * (max(shown) - min(shown)) or 0.01
    axes.set_ylim(min(shown) - margin, max(shown) + margin)
    if reference is not None:
        axes.axhline(reference, color=MUTED, **dashed)
    if kind == "ranks":
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    _steps_below(axes)
    return _svg(figure, f"{kind}-{key}")


@matplotlib.rc_context(_STYLE)
def ranks_over_time(run: Run) -> str:
    """Draw a bar per layer up to the last step as SVG: the stronger its color, the more of its largest rank sum is left."""
    history = run.ranks
    layers = list(dict.fromkeys(layer for line in history for layer in line["ranks"]))
    steps = [line["step"] for line in history]
    end = max(run.step, steps[-1] + 1)
    figure, axes = _figure(14, 0.6 + 0.31 * len(layers))
    for row, layer in enumerate(layers):
        ranks = [tuple(line["ranks"].get(layer, ())) for line in history]
        largest = max(map(sum, ranks)) or 1
        starts = [i for i in range(len(ranks)) if i == 0 or ranks[i] != ranks[i - 1]]
        for start, stop in zip(starts, [*starts[1:], len(ranks)], strict=True):
            left, right = steps[start], end if stop == len(ranks) else steps[stop]
            share = sum(ranks[start]) / largest
            axes.barh(row, right - left, left=left, height=0.86, color=SERIES[run.color], alpha=0.08 + 0.6 * share, linewidth=0)
            text = " ".join(map(str, ranks[start])) or "gone"
            if (right - left) / (end - steps[0]) > 0.009 * (len(text) + 1):
                axes.text((left + right) / 2, row, text, ha="center", va="center", fontsize=9, color=INK)
    stages = [line["stage"] for line in history]
    for i, stage in enumerate(stages):
        if i == 0 or stage != stages[i - 1]:
            axes.text(steps[i], -0.75, stage, fontsize=9.5, color=MUTED, ha="left", va="bottom")
            axes.axvline(steps[i], color=MUTED, linewidth=0.8, zorder=1.5)
    axes.set_yticks(range(len(layers)), [short_name(layer) for layer in layers])
    axes.tick_params(axis="y", labelcolor=INK, labelsize=10)
    axes.set_ylim(len(layers) - 0.4, -0.7)
    axes.set_xlim(steps[0], end)
    axes.grid(False)
    _steps_below(axes)
    return _svg(figure, f"ranks-{run.color}")


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _steps_below(axes: Axes) -> None:
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _smooth(values: np.ndarray) -> np.ndarray:
    """Average over a centered window of a twentieth of the points, narrower at the ends."""
    half, numbers = len(values) // 40, np.arange(len(values))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    left, right = np.maximum(numbers - half, 0), np.minimum(numbers + half + 1, len(values))
    smooth: np.ndarray = (sums[right] - sums[left]) / (right - left)
    return smooth


def _svg(figure: Figure, name: str) -> str:
    """Return the drawing as an <svg> element. `name` keeps its ids different from those of the page's other drawings."""
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(text, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, f"var({variable})")
    # The ids of groups are the same in every drawing and nothing refers to them. The page sets font and width.
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r"font-family: [^;\"]*; ?", "", svg)
    return re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)
