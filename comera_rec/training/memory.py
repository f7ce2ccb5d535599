"""Peak memory of training, over the whole run and over parts of it; and what happens to freed memory."""

import ctypes
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of mallopt(3)
_KEPT_BYTES, _LARGEST_MMAP_THRESHOLD = 1 << 30, 32 << 20


def keep_freed_memory() -> None:
    """Let glibc keep up to 1 GiB of freed memory for the next step, instead of returning it to the system.

    Otherwise every step requests the pages of its largest tensors again, and the system fills each page with zeros. Tensors above
    32 MiB still have separate mappings. Arrow's arrays come from glibc, too: a pool of its own would keep another 40 MiB. Other
    systems' allocators are left as they are.
    """
    if mallopt := _glibc("mallopt"):
        pa.set_memory_pool(pa.system_memory_pool())
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_ARENA_MAX, len(os.sched_getaffinity(0)))  # of the default, eight for each core, each keeps freed memory


def return_freed_memory() -> None:
    """Return to the system what glibc holds of freed memory, such as what initialization needed for a while."""
    if trim := _glibc("malloc_trim"):
        trim(0)


def _glibc(name: str) -> Any:
    """Return a function of glibc; None where there is another library."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


class PeakMemory:
    """Peak memory in MiB: allocated on a GPU; elsewhere resident, beyond what the process held when this object was made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._highest = 0.0
        self._take()  # drops the earlier peak, which is not training's
        self._resident_mib = self._take() if device.type != "cuda" else 0.0

    def take(self) -> float:
        """Return the peak since the last call; since the beginning where the system can't reset it."""
        peak = self._take() - self._resident_mib
        self._highest = max(self._highest, peak)
        return peak

    @property
    def highest(self) -> float:
        """The peak over the whole run."""
        self.take()
        return self._highest

    def _take(self) -> float:
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device) / 2**20
            torch.cuda.reset_peak_memory_stats(self._device)
            return peak
        line = next((line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:")), "VmHWM: 0")  # a sandbox's
        with suppress(OSError):  # a container may forbid it
            _CLEAR_REFS.write_text("5")  # the peak becomes what is resident now
        return int(line.split()[1]) / 2**10
