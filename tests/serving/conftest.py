"""Fixtures: a small trained run and its packages, each compiled once."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from comera_rec.data import ParquetBatches
from comera_rec.training.config import load_config
from comera_rec.training.trainer import Trainer
from tests.conftest import RUN
from tests.training.run_folders import call


@pytest.fixture(scope="session")
def trained(data_set: Path) -> Path:
    """The folder of a run of twelve steps, with its data set beside it."""
    folder = data_set.parent
    (folder / "run.toml").write_text(RUN.format(output=folder / "run", data=data_set))
    Trainer(load_config(folder / "run.toml", ("linears.min_features=8",))).train()
    return folder / "run"


@pytest.fixture(scope="session")
def package(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`package(form)` -> a float32 MODEL.pt2."""

    @cache
    def write(form: str) -> Path:
        output = tmp_path_factory.mktemp(form) / "model.pt2"
        options = [] if form == "portable" else ["--form", form]
        assert call("export", "--checkpoint", trained, "--output", output, *options) == 0
        return output

    return write


@pytest.fixture(scope="session")
def model(package: Callable[[str], Path]) -> Path:
    """A portable package."""
    return package("portable")


@pytest.fixture(scope="session")
def data(trained: Path) -> Path:
    """The data set that the run was trained with."""
    return trained.parent / "data"


@pytest.fixture(scope="session")
def request_of(trained: Path) -> Callable[[int], tuple[Tensor, Tensor, Tensor]]:
    """`request_of(rows)` -> dense, values and lengths of the first rows of the test split."""

    def read(rows: int) -> tuple[Tensor, Tensor, Tensor]:
        batch = next(iter(ParquetBatches(trained.parent / "data", "test", batch_size=rows)))
        return batch.dense, batch.sparse.values(), batch.sparse.lengths().to(torch.int64)

    return read
