"""Peak memory in sections of a run."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import pytest

# In a separate process, because memory that other tests use or freed would affect the numbers.
PROGRAM = """
import json, pathlib, torch
from comera_rec.training.memory import PeakMemory, keep_freed_memory, return_freed_memory

def resident_mib():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) / 256  # pages of 4 KiB

def peak_of(mib):
    torch.ones(mib << 18).sum()
    return memory.take()

torch.ones(400 << 18).sum()
memory = PeakMemory(torch.device("cpu"))
peaks = [peak_of(200), peak_of(40), memory.highest]
keep_freed_memory()
before = resident_mib()
blocks = [torch.ones(1 << 20) for _ in range(50)]  # 200 MiB
del blocks
kept = resident_mib()
return_freed_memory()
print(json.dumps([*peaks, kept - before, resident_mib() - before]))
"""


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or not os.access("/proc/self/clear_refs", os.W_OK), reason="peaks can't be reset here"
)
def test_a_peak_is_that_of_its_section_and_freed_memory_is_returned() -> None:
    output = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout
    large, small, highest, kept, returned = json.loads(output)
    assert 190 < large < 260
    assert small < large - 100
    assert highest == large
    assert kept > 150
    assert returned < 50
