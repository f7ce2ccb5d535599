"""Runs that are killed at random moments end as if nothing had happened; `kills.py` is the long form."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from kills import OFTEN, kill_until_done

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("processes", [1, 2])
def test_killed_at_random_moments(config_file: Path, processes: int, number: signal.Signals) -> None:
    settings = [*OFTEN, "training.steps=40"]
    killed_at = kill_until_done(config_file, settings, processes=processes, number=number, kills=3)
    assert killed_at.total() > 0
