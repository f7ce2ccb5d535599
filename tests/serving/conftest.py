"""Fixtures: a small trained run and its packages, each compiled once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._inductor.cpu_vec_isa import pick_vec_isa

from comera_rec.cli.main import main
from comera_rec.data import ParquetBatches
from comera_rec.training.config import load_config
from comera_rec.training.trainer import Trainer
from data_pipeline.preprocess import PreprocessOptions, preprocess
from data_pipeline.synth import SynthOptions, synth

RUN = """
output = "{folder}/run"
seed = 3
[data]
path = "{folder}/data"
batch_size = 128
[model]
embedding_dim = 8
dense_arch = [64]
over_arch = [64]
[tables]
tt_ranks = 4
min_rows = 100
[linears]
tt_ranks = 4
min_features = 8
[training]
steps = 12
"""


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of twelve steps, with its data set beside it."""
    folder = tmp_path_factory.mktemp("served")
    synth(SynthOptions(rows=4000, output=folder / "train.txt", seed=1, scale=0.001))
    preprocess(PreprocessOptions(inputs=(folder / "train.txt",), output=folder / "data", min_count=1))
    (folder / "run.toml").write_text(RUN.format(folder=folder))
    Trainer(load_config(folder / "run.toml", ())).train()
    return folder / "run"


@pytest.fixture(scope="session")
def common_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inductor's cache folder while packages are written."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def package(trained: Path, common_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`package(form)` -> a float32 MODEL.pt2."""

    @cache
    def write(form: str) -> Path:
        output = tmp_path_factory.mktemp(form) / "model.pt2"
        pick_vec_isa()  # takes twenty seconds without the machine's own cache
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(common_cache))
            with pytest.raises(SystemExit, match="0"):
                main(["export", "--checkpoint", str(trained), "--form", form, "--output", str(output)])
        return output

    return write


@pytest.fixture(scope="session")
def request_of(trained: Path) -> Callable[[int], tuple[Tensor, Tensor, Tensor]]:
    """`request_of(rows)` -> dense, values and lengths of the first rows of the test split."""

    def read(rows: int) -> tuple[Tensor, Tensor, Tensor]:
        batch = next(iter(ParquetBatches(trained.parent / "data", "test", batch_size=rows)))
        return batch.dense, batch.sparse.values(), batch.sparse.lengths().to(torch.int64)

    return read
