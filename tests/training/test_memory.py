"""Peak memory in sections of a run, and of initializing tables."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from comera_rec.training.memory import PeakMemory
from comera_rec.training.model import fuse_dense_tables_
from comera_rec.training.placement import host_memory

CPU = torch.device("cpu")

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


def collection(rows: int) -> nn.Sequential:
    tables = [EmbeddingBagConfig(name="large", num_embeddings=rows, embedding_dim=64, feature_names=["large"])]
    return nn.Sequential(EmbeddingBagCollection(tables=tables, device=torch.device("meta")))


def test_tables_on_the_meta_device_are_initialized_in_place() -> None:
    fuse_dense_tables_(collection(9), 0.1, CPU)  # loads what the first call needs
    model, memory = collection(500_000), PeakMemory(CPU)
    fuse_dense_tables_(model, 0.1, CPU)
    (weight,) = model.state_dict().values()
    assert memory.highest < 1.4 * weight.nbytes / 2**20
    bound = 500_000**-0.5  # of a uniform distribution
    assert 0.999 * bound < weight.abs().max() <= bound
    assert abs(weight.std() * 3**0.5 / bound - 1) < 0.01


def test_a_container_limits_the_memory_of_its_host(tmp_path: Path) -> None:
    unlimited, limit = tmp_path / "memory.max", tmp_path / "limit_in_bytes"
    unlimited.write_text("max\n")
    whole = host_memory([unlimited, tmp_path / "missing"])
    assert whole > 1 << 28
    limit.write_text(f"{whole // 2}\n")
    assert host_memory([unlimited, limit]) == whole // 2
