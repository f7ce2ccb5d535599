"""The config of a small run, and runs that were trained once, for tests that train."""

from pathlib import Path

import pytest

from comera_rec.training.config import load_config
from comera_rec.training.trainer import Trainer
from tests.conftest import RUN
from tests.training.run_folders import DENSE


@pytest.fixture
def config_file(tmp_path: Path, data_set: Path) -> Path:
    """The config file of a run of twelve steps."""
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(output=tmp_path / "run", data=data_set))
    return path


@pytest.fixture(scope="session")
def dense(data_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of twelve steps without TT modules; its files must stay as they are."""
    folder = tmp_path_factory.mktemp("dense")
    (folder / "run.toml").write_text(RUN.format(output=folder / "run", data=data_set))
    Trainer(load_config(folder / "run.toml", DENSE)).train()
    return folder / "run"
