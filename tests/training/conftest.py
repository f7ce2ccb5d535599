"""Fixtures: a small preprocessed data set and a config for tests that train."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_pipeline.preprocess import PreprocessOptions, preprocess
from data_pipeline.synth import SynthOptions, synth

RUN = """
output = "{output}"
seed = 3
[data]
path = "{data}"
batch_size = 128
shuffle_rows = 512
[model]
embedding_dim = 8
dense_arch = [32]
over_arch = [32]
[tables]
tt_ranks = 4
min_rows = 100
[linears]
tt_ranks = 4
min_features = 32
[training]
steps = 12
log_every = 3
checkpoint_every = 6
"""


@pytest.fixture(scope="session")
def data_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of 4,000 synthetic rows."""
    folder = tmp_path_factory.mktemp("data_set")
    synth(SynthOptions(rows=4000, output=folder / "train.txt", seed=1, scale=0.001))
    preprocess(PreprocessOptions(inputs=(folder / "train.txt",), output=folder / "data"))
    return folder / "data"


@pytest.fixture
def config_file(tmp_path: Path, data_set: Path) -> Path:
    """The config file of a run of twelve steps."""
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(output=tmp_path / "run", data=data_set))
    return path
