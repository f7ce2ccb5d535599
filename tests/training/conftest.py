"""The config of a small run, for tests that train."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import RUN


@pytest.fixture
def config_file(tmp_path: Path, data_set: Path) -> Path:
    """The config file of a run of twelve steps."""
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(output=tmp_path / "run", data=data_set))
    return path
