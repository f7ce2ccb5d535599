"""Peak memory: what a call adds, and what a process has taken. On CPUs native allocations are included, on GPUs only torch's."""

import gc
import os
import re
from collections.abc import Callable
from pathlib import Path

import torch

from comera_rec.training.memory import return_freed_memory

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def memory_is_measurable(device: str) -> bool:
    """Whether the peak can be reset and read here: on GPUs, and under Linux on CPUs."""
    return device != "cpu" or os.access(_CLEAR_REFS, os.W_OK)


def peak_extra_memory(
    call: Callable[[], object], release: Callable[[], object] = lambda: None, *, repeats: int = 2, device: str = "cpu"
) -> list[float]:
    """Measure by how many MiB a call raises the peak of this process's resident memory, or of a GPU's, above what was taken before.

    Args:
        call: what to measure. It has run before, so that optimizer state and compiled kernels don't count.
        release: frees what a call leaves behind; called before each measurement.
        repeats: how often the call is measured.
        device: whose memory.
    """
    on_cpu, peaks = device == "cpu", []
    for _ in range(repeats):
        release()
        gc.collect()
        if on_cpu:
            return_freed_memory()  # a call that reuses freed blocks would not raise the peak
            _CLEAR_REFS.write_text("5")  # sets VmHWM to VmRSS
        else:
            torch.cuda.reset_peak_memory_stats(device)
        before = _kib("VmRSS") / 1024 if on_cpu else torch.cuda.memory_allocated(device) / 2**20
        result = call()
        peak = resident_peak_mib() if on_cpu else torch.cuda.max_memory_allocated(device) / 2**20
        peaks.append(max(0.0, peak - before))
        del result
    return peaks


def resident_peak_mib() -> float:
    """The peak of this process's resident memory since it started, in MiB, libraries included."""
    return _kib("VmHWM") / 1024


def _kib(name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    assert match is not None, name
    return int(match[1])
