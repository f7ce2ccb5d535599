"""Peaks of memory over stretches of a run."""

from __future__ import annotations

import sys

import pytest
import torch

from comera_rec.training.memory import PeakMemory


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere peaks can't be counted anew")
def test_a_peak_is_that_of_its_stretch() -> None:
    memory = PeakMemory(torch.device("cpu"))
    torch.ones(50 << 20).sum()  # 200 MiB
    large = memory.take()
    torch.ones(10 << 20).sum()
    small = memory.take()
    assert 190 < large < 260
    assert small < large - 100
    assert memory.highest == large
