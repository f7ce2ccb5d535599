"""What the machine could do at best, and what a lookup must do at least: the time that no implementation gets below.

U unique rows of N columns, L lookups, B bags; a core's slices have m numbers each that a batch meets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch

_COPIED, _SIDE, _REPEATS = 256 << 20, 2048, 5


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Measured in the same process: bytes read or written by a copy, and multiply-adds of a large product, per second."""

    bytes_per_s: float
    multiply_adds_per_s: float


@cache
def ceilings(device: str) -> Ceilings:
    """Of this machine: the best of a few tries, because others may use it too."""
    source = torch.ones(_COPIED // 4, device=device)
    target, square = torch.empty_like(source), torch.randn(_SIDE, _SIDE, device=device)

    def best(call: Callable[[], object]) -> float:
        times = []
        for _ in range(_REPEATS + 1):
            start = time.perf_counter()
            call()
            if device.startswith("cuda"):
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - start)
        return min(times[1:])

    copied, multiplied = best(lambda: target.copy_(source)), best(lambda: square @ square)
    return Ceilings(bytes_per_s=2 * _COPIED / copied, multiply_adds_per_s=_SIDE**3 / multiplied)


@dataclass(frozen=True, kw_only=True)
class Least:
    """Bytes that must cross the memory's bus at least once in a pass, and its multiply-adds."""

    bytes: float
    multiply_adds: float

    def counted(self, device: str) -> dict[str, float]:
        """What a row tells: both, the limits measured, and the time of the slower of the two in ms."""
        machine = ceilings(device)
        slower = max(self.bytes / machine.bytes_per_s, self.multiply_adds / machine.multiply_adds_per_s)
        return {
            "least_mib": self.bytes / 2**20,
            "least_multiply_adds": self.multiply_adds,
            "copy_gb_per_s": machine.bytes_per_s / 1e9,
            "gemm_gflop_per_s": 2 * machine.multiply_adds_per_s / 1e9,
            "limit_ms": 1e3 * slower,
        }


def describe_limits(counted: Mapping[str, float]) -> str:
    """A line about the machine."""
    return f"copies {counted['copy_gb_per_s']:.1f} GB/s, multiplies {counted['gemm_gflop_per_s']:.0f} GFLOP/s"
