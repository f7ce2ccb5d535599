"""Clocks: times providers in turns, so that whatever else the machine does affects all of them alike."""

import gc
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long to measure: until `seconds` have passed, but at least `min_rounds` and at most `max_rounds` rounds."""

    warmup: int = 2
    min_rounds: int = 10
    max_rounds: int = 50
    seconds: float = 6.0


def percentiles(samples: Iterable[float]) -> tuple[float, float, float]:
    """(p20, p50, p80), linearly interpolated."""
    p20, p50, p80 = np.percentile(list(samples), [20, 50, 80])
    return float(p20), float(p50), float(p80)


def alternate(
    calls: Mapping[str, Callable[[int], object]],
    plan: Plan,
    *,
    synchronize: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Time calls in turns, A B C, C B A, A B C ..., with the garbage collector off, so that each follows each of its neighbors.

    Args:
        calls: name -> call; a call takes the number of its round, so that all get the same input in the same round.
        plan: number of rounds.
        synchronize: waits for the device; called before each reading of the clock.
        clock: returns seconds.

    Returns:
        name -> milliseconds, one number per round.
    """
    for warmup in range(plan.warmup):
        for call in calls.values():
            call(warmup)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        first = clock()
        for turn in range(plan.max_rounds):
            for name, call in list(calls.items())[:: -1 if turn % 2 else 1]:
                synchronize()
                start = clock()
                result = call(turn)
                synchronize()
                samples[name].append((clock() - start) * 1000)
                del result  # freed outside the timed section
            if turn + 1 >= plan.min_rounds and clock() - first >= plan.seconds:
                break
    finally:
        if was_enabled:
            gc.enable()
    return samples
