"""Peak memory in sections of a run."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import pytest

# In a separate process, because memory that other tests use or freed would affect the numbers.
STRETCHES = """
import json, pathlib, torch
from comera_rec.training.memory import PeakMemory

def peak_of(mib):
    torch.ones(mib << 18).sum()
    return memory.take()

{before}
memory = PeakMemory(torch.device("cpu"))
print(json.dumps([peak_of(200), peak_of(40), memory.highest]))
"""


def _stretches(before: str) -> list[float]:
    script = STRETCHES.format(before=before)
    return list(json.loads(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout))


def _peaks_can_be_reset() -> bool:
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return False
    return True


@pytest.mark.skipif(not _peaks_can_be_reset(), reason="peaks can't be reset here")
def test_a_peak_is_that_of_its_section() -> None:
    large, small, highest = _stretches(before="torch.ones(400 << 18).sum()")
    assert 190 < large < 260
    assert small < large - 100
    assert highest == large


def test_peaks_are_of_the_whole_run_if_they_cannot_be_reset() -> None:
    absent = "import comera_rec.training.memory as module; module._CLEAR_REFS = pathlib.Path('/proc/absent')"
    first, second, highest = _stretches(absent)
    assert 190 < first < 260
    assert first <= second == highest < 260


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc" or not os.access("/proc/self/statm", os.R_OK), reason="glibc on Linux")
def test_freed_memory_is_returned() -> None:
    script = """
import pathlib, torch
from comera_rec.training.memory import keep_freed_memory, return_freed_memory

def resident_mib():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) / 256  # pages of 4 KiB

keep_freed_memory()
before = resident_mib()
blocks = [torch.ones(1 << 20) for _ in range(50)]  # 200 MiB
del blocks
kept = resident_mib()
return_freed_memory()
print(kept - before, resident_mib() - before)
"""
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    kept, returned = map(float, output.split())
    assert kept > 150
    assert returned < 50
