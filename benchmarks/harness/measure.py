"""From cases to rows: checks agreement, then measures memory and times providers, case by case."""

import datetime
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from benchmarks.harness.agreement import Disagreement, require_agreement
from benchmarks.harness.environment import describe
from benchmarks.harness.memory import memory_is_measurable, peak_extra_memory
from benchmarks.harness.rows import Row
from benchmarks.harness.timing import Plan, alternate, percentiles
from benchmarks.harness.workload import PASSES, Sizes, Workload
from data_pipeline.errors import UserError

Build = Callable[[Any, str, int], Workload]
AnyCase = TypeVar("AnyCase", bound=Sizes)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the command line chooses for every benchmark."""

    quick: bool = False
    device: str = "cpu"
    seed: int = 0
    memory: bool = True
    only: Mapping[str, str] = field(default_factory=dict)
    """Sizes that a case must have to be measured, by the names of `Sizes.shapes`."""
    plan: Plan = field(default_factory=Plan)
    data: Path | None = None
    """A folder of data outside the repository."""
    finished: Sequence[Row] = ()
    """Rows of an earlier run, which a resumable benchmark doesn't repeat."""


def chosen(cases: Iterable[AnyCase], only: Mapping[str, str]) -> list[AnyCase]:
    """The cases that have the sizes in `only`.

    Raises:
        ValueError: if there is none.
    """
    cases = list(cases)
    selected = [case for case in cases if all(str(case.shapes().get(name)) == size for name, size in only.items())]
    if not selected:
        sizes = {name: sorted({str(case.shapes()[name]) for case in cases}) for name in cases[0].shapes()}
        raise UserError(f"no case has {dict(only)}: sizes are {sizes}")
    return selected


def each_case(op: str, cases: Iterable[AnyCase], settings: Settings) -> Iterator[tuple[AnyCase, Callable[..., list[Row]]]]:
    """Yield the chosen cases that aren't finished, with a progress bar on a terminal, each with a function that makes its rows.

    Args:
        op: the operation's name.
        cases: what to measure.
        settings: from the command line.

    Yields:
        A case, and `case_rows` without its first three arguments.
    """
    finished = [row.shapes for row in settings.finished if (row.op, row.seed) == (op, settings.seed)]
    left = [case for case in chosen(cases, settings.only) if case.shapes() not in finished]
    for case in tqdm(left, desc=op, unit="case", disable=None):
        yield case, partial(case_rows, op, case, settings)


def measure_cases(op: str, cases: Iterable[AnyCase], build: Build, settings: Settings) -> Iterator[list[Row]]:
    """Yield the rows of each case; `build` makes a workload of a case, a device and a seed."""
    for case, _ in each_case(op, cases, settings):
        yield measure_case(op, case, build, settings)


def measure_case(op: str, case: Sizes, build: Build, settings: Settings) -> list[Row]:
    """Measure one case.

    Raises:
        Disagreement: if any provider's values are wrong; nothing of the case is timed then.
    """
    workload = build(case, settings.device, settings.seed)
    providers = {}
    reference = workload.reference()
    try:
        for name, make in workload.providers.items():
            providers[name] = make()
            require_agreement(reference, {name: providers[name].verify()})
    except Disagreement as error:
        raise Disagreement(f"{op}, {case.shapes()}: {error}") from None
    del reference
    gc.collect()

    synchronize = (lambda: torch.cuda.synchronize(settings.device)) if settings.device.startswith("cuda") else lambda: None
    counted = {name: workload.counted(provider) for name, provider in providers.items()}
    rows = []
    for pass_ in PASSES:
        calls = {name: provider.passes[pass_] for name, provider in providers.items() if pass_ in provider.passes}
        memory = {}
        if settings.memory and memory_is_measurable(settings.device):
            for name, call in calls.items():
                call(0)
                memory[name] = peak_extra_memory(partial(call, 0), providers[name].release, device=settings.device)
        samples = alternate(calls, settings.plan, synchronize=synchronize) if calls else {}
        for unit, measured in (("ms", samples), ("MiB", memory)):
            rows += case_rows(op, case, settings, pass_, unit, measured, counted, workload.baselines)
    return rows


def case_rows(
    op: str,
    case: Sizes,
    settings: Settings,
    pass_: str,
    unit: str,
    samples: Mapping[str, list[float]],
    counted: Mapping[str, dict[str, float]],
    baselines: Iterable[str] = (),
    **replaced: Any,
) -> list[Row]:
    """Make a row for each provider that has samples of a pass, with ratios to the baselines that also have some.

    `replaced` are fields that differ from those of the case.
    """
    spreads = {name: percentiles(values) for name, values in samples.items()}
    common = {
        "op": op, "shapes": case.shapes(), "dtype": case.dtype, "pass_": pass_, "unit": unit, "seed": settings.seed,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), **describe(settings.device), **replaced,
    }  # fmt: skip
    return [
        Row(
            provider=name, p20=p20, p50=p50, p80=p80, samples=len(samples[name]), counted=counted.get(name, {}),
            ratios={other: spreads[other][1] / p50 for other in baselines if other in spreads and p50 > 0}, **common,
        )
        for name, (p20, p50, p80) in spreads.items()
    ]  # fmt: skip
