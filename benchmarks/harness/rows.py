"""The one row schema of all benchmarks, and its JSON lines."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from data_pipeline.errors import UserError

UNITS = ("ms", "MiB", "NE")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One provider's measurement of one pass of one case.

    Attributes:
        op: the operation, by default the benchmark's name.
        provider: the implementation that did the work.
        shapes: sizes of the case: batch, rows, dim, order, ranks, distribution of the ids and so on; plain JSON values.
        dtype: type of the weights.
        pass_: "forward", "forward+backward", "step" (with the optimizer's update) or "run" (of a whole program); "test" of a whole
            training; "pass" in JSON.
        p20, p50, p80: percentiles over the samples.
        unit: "ms" for time, "MiB" for the peak extra memory of one call ("step": of a whole process), "NE" for the normalized
            cross-entropy of a trained model.
        samples: number of calls that the percentiles are taken over.
        ratios: baseline -> the baseline's p50 over this p50, in the same run; above 1 is better than the baseline.
        counted: what was counted instead of measured, e.g. params, flops.
        device: "cpu" or "cuda".
        machine: kind of machine, the folder of its results.
        hardware: the machine's CPU flags and cache sizes; empty in rows older than this field.
        versions: of python, torch, torchrec, fbgemm and comera-rec.
        threads: CPU threads of torch.
        commit: of this repository, with "-dirty" where tracked files differ from it.
        seed: seed of weights and inputs.
        date: UTC, ISO 8601.
    """

    op: str
    provider: str
    shapes: dict[str, Any]
    dtype: str
    pass_: str
    p20: float
    p50: float
    p80: float
    unit: str
    samples: int
    ratios: dict[str, float]
    counted: dict[str, float] = field(default_factory=dict)
    device: str
    machine: str
    hardware: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str]
    threads: int
    commit: str
    seed: int
    date: str

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise UserError(f"unit is {self.unit!r}: choose one of {', '.join(map(repr, UNITS))}")
        if not self.p20 <= self.p50 <= self.p80:
            raise UserError(f"p20 {self.p20}, p50 {self.p50}, p80 {self.p80} must ascend")

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps({name.rstrip("_"): value for name, value in asdict(self).items()}, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Row:
        """The inverse of `to_json`.

        Raises:
            ValueError: naming the keys that are missing or unknown.
        """
        record = {"hardware": {}, **json.loads(line)}
        names = {f.name.rstrip("_"): f.name for f in fields(cls)}
        missing, unknown = sorted(names.keys() - record.keys()), sorted(record.keys() - names.keys())
        if missing or unknown:
            raise UserError(f"not a benchmark row: missing {missing}, unknown {unknown}")
        return cls(**{names[key]: value for key, value in record.items()})


def read_rows(path: Path) -> list[Row]:
    """All rows of a results file."""
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            rows.append(Row.from_json(line))
        except ValueError as error:
            raise UserError(f"{path}:{number}: {error}") from None
    return rows


def select(measured: Sequence[Row], /, *, provider: str = "", pass_: str = "", unit: str = "", **sizes: Any) -> list[Row]:
    """The rows that have this provider, pass, unit and these sizes."""
    conditions = {"provider": provider, "pass_": pass_, "unit": unit}
    return [
        row
        for row in measured
        if all(getattr(row, name) == value for name, value in conditions.items() if value)
        and all(row.shapes.get(name) == value for name, value in sizes.items())
    ]


def one(measured: Sequence[Row], /, **conditions: Any) -> Row:
    """The only such row."""
    (row,) = select(measured, **conditions)
    return row


@contextmanager
def writing_rows(path: Path, *, append: bool = False) -> Iterator[Callable[[Iterable[Row]], None]]:
    """Yield a function that writes rows to a temporary file, which is renamed once all rows are there.

    With `append` rows go to the end of the file itself, for resumable benchmarks.
    """
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent} for {path.name}: create it first")
    partial = path if append else path.with_name(path.name + ".partial")
    with partial.open("a" if append else "w") as file:

        def write(rows: Iterable[Row]) -> None:
            file.writelines(row.to_json() + "\n" for row in rows)
            file.flush()

        yield write
    os.replace(partial, path)


def format_case(rows: Sequence[Row]) -> str:
    """Format all rows of one case: median, p20 to p80, ratios above 1 if it is better than the baseline, and what was counted."""
    first, width = rows[0], max(len(row.provider) for row in rows)
    sizes = ", ".join(f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}" for name, value in first.shapes.items())
    lines = [
        f"{first.op}, {sizes}, {first.dtype}",
        f"  ({first.machine}, threads {first.threads}, commit {first.commit}, seed {first.seed})",
    ]
    for row in rows:
        ratios = [f"{ratio:.2f}x vs {name}" for name, ratio in row.ratios.items() if name != row.provider]
        more = [*ratios, *(f"{name} {short(value)}" for name, value in row.counted.items())]
        spread = f"{row.p50:,.5g} {row.unit} ({short(row.p20)} to {short(row.p80)})"
        lines.append(f"  {row.pass_:<16} {row.provider:<{width}} {spread:<30} {', '.join(more)}".rstrip())
    return "\n".join(lines)


def short(value: float) -> str:
    """Format a number with three digits, or with all digits before the decimal point if there are more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
