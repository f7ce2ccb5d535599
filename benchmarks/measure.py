"""From cases to rows: agree, then time in turns, then measure memory."""

from __future__ import annotations

import datetime
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.agreement import Disagreement, require_agreement
from benchmarks.environment import describe
from benchmarks.memory import Call, memory_is_measurable, peak_extra_memory
from benchmarks.rows import Row
from benchmarks.timing import Plan, alternate, percentiles
from benchmarks.workload import PASSES, Case, Provider, Workload

Build = Callable[[Any, str, int], Workload]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the command line chooses for every benchmark."""

    quick: bool = False
    device: str = "cpu"
    seed: int = 0
    memory: bool = True
    plan: Plan = field(default_factory=Plan)


def measure_cases(op: str, cases: Iterable[Case], build: Build, settings: Settings) -> Iterator[list[Row]]:
    """Measure cases one after the other, with a progress bar on a terminal.

    Args:
        op: the operation's name.
        cases: what to measure.
        build: (case, device, seed) -> workload; importable by name, because child processes build it again.
        settings: from the command line.

    Yields:
        The rows of a case.
    """
    environment = describe(settings.device)
    for case in tqdm(list(cases), desc=op, unit="case", disable=None):
        yield measure_case(op, case, build, settings, environment)


def measure_case(op: str, case: Case, build: Build, settings: Settings, environment: Mapping[str, Any]) -> list[Row]:
    """All rows of one case.

    Raises:
        Disagreement: if any provider's numbers are wrong; nothing was timed then.
    """
    workload = build(case, settings.device, settings.seed)
    providers = {name: make() for name, make in workload.providers.items()}
    try:
        require_agreement(workload.reference(), {name: provider.verify() for name, provider in providers.items()})
    except Disagreement as error:
        raise Disagreement(f"{op}, {case.shapes()}: {error}") from None
    gc.collect()

    def rows(pass_: str, unit: str, samples: Mapping[str, list[float]]) -> list[Row]:
        spreads = {name: percentiles(values) for name, values in samples.items()}
        return [
            Row(
                op=op,
                provider=name,
                shapes=case.shapes(),
                dtype=case.dtype,
                pass_=pass_,
                p20=p20,
                p50=p50,
                p80=p80,
                unit=unit,
                samples=len(samples[name]),
                ratios={other: spreads[other][1] / p50 for other in workload.baselines if other in spreads and p50 > 0},
                counted=workload.counted(providers[name], pass_),
                seed=settings.seed,
                date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                **environment,
            )
            for name, (p20, p50, p80) in spreads.items()
        ]

    synchronize = (lambda: torch.cuda.synchronize(settings.device)) if settings.device.startswith("cuda") else lambda: None
    found = []
    for pass_ in PASSES:
        calls = {name: provider.passes[pass_] for name, provider in providers.items() if pass_ in provider.passes}
        if not calls:
            continue
        found += rows(pass_, "ms", alternate(calls, settings.plan, synchronize=synchronize))
        if settings.memory and memory_is_measurable(settings.device):
            peaks = {
                name: peak_extra_memory(
                    prepare_call, build, case, settings.device, settings.seed, name, pass_, device=settings.device
                )
                for name in calls
            }
            found += rows(pass_, "MiB", peaks)
    return found


def prepare_call(build: Build, case: Case, device: str, seed: int, provider: str, pass_: str) -> tuple[Call, Callable[[], None]]:
    """One provider's call, warmed up, and what drops its gradients; for `peak_extra_memory`."""
    instance: Provider = build(case, device, seed).providers[provider]()
    call = instance.passes[pass_]
    call(0)  # optimizer state and compiled kernels are no part of a call's extra memory
    return call, instance.release
