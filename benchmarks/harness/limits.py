"""What the machine can do at best and what a lookup must do at least: the time that no implementation can beat.

U unique rows of N columns, L lookups, B bags.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

_COPIED, _SIDE, _REPEATS = 256 << 20, 2048, 5


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Rates measured in the same process: bytes per second that a copy moves, and multiply-adds per second of a large product."""

    bytes_per_s: float
    multiply_adds_per_s: float


@cache
def ceilings(device: str) -> Ceilings:
    """Measure this machine's ceilings: the best of a few tries, because others may use the machine too."""
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
    """The bytes that a pass must move to or from memory at least, and its multiply-adds."""

    bytes: float
    multiply_adds: float

    def counted(self, device: str) -> dict[str, float]:
        """The fields of a row: both numbers, the measured ceilings, and the time in ms of the slower of the two."""
        machine = ceilings(device)
        slower = max(self.bytes / machine.bytes_per_s, self.multiply_adds / machine.multiply_adds_per_s)
        return {
            "least_mib": self.bytes / 2**20,
            "least_multiply_adds": self.multiply_adds,
            "copy_gb_per_s": machine.bytes_per_s / 1e9,
            "gemm_gflop_per_s": 2 * machine.multiply_adds_per_s / 1e9,
            "limit_ms": 1e3 * slower,
        }
