"""Tables that start from the vectors of a data set."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import run as run_processes

from comera_rec.convert.start import start_from_vectors_, starting_rows
from comera_rec.nn import TTEmbeddingBag
from comera_rec.training.checkpoint import latest_checkpoint, open_checkpoint
from comera_rec.training.config import load_config
from comera_rec.training.model import Schema, table_configs
from comera_rec.training.trainer import Trainer
from data_pipeline.manifest import read_manifest
from data_pipeline.preprocess import PreprocessOptions, preprocess
from data_pipeline.synth import SynthOptions, synth


@pytest.fixture(scope="module")
def ordered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set in order of similarity."""
    folder = tmp_path_factory.mktemp("ordered")
    synth(SynthOptions(rows=4000, output=folder / "train.txt", seed=1, scale=0.001, groups=0.5))
    preprocess(PreprocessOptions(inputs=(folder / "train.txt",), output=folder / "data", order="similarity"))
    return folder / "data"


def saved_start(rank: int, config_file: Path, overrides: list[str], output: Path) -> dict[str, torch.Tensor]:
    """The tensors of a new run at step 0."""
    trainer = Trainer(load_config(config_file, [*overrides, f"output={output}"]))
    trainer.save()
    if dist.is_initialized():
        dist.barrier()
    path = latest_checkpoint(output / "checkpoints")
    assert path is not None
    checkpoint = open_checkpoint(path)
    return checkpoint.read(sorted(name for name in checkpoint.sizes if "sparse_arch" in name))


@pytest.mark.distributed
@pytest.mark.parametrize("tables", [["tables.format=dense"], ["tables.tt_ranks=16", "tables.hot_rows=0.5"]])
def test_the_start_is_the_same_on_any_number_of_processes(
    config_file: Path, ordered: Path, tmp_path: Path, tables: list[str]
) -> None:
    overrides = [f"data.path={ordered}", "tables.start=vectors", *tables]
    one = saved_start(0, config_file, overrides, tmp_path / "one")
    two, _ = run_processes(2, saved_start, config_file, overrides, tmp_path / "two")
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, two[name], msg=name)
    random = saved_start(0, config_file, [*overrides, "tables.start=random"], tmp_path / "random")
    assert not any(torch.equal(value, one[name]) for name, value in random.items() if name.endswith(("weight", "core_0")))
    if tables == ["tables.format=dense"]:
        column = next(column for column in read_manifest(ordered).categorical_columns if column.name == "C3")
        assert column.vectors
        vectors = torch.from_numpy(np.load(ordered / column.vectors.path)).float()
        (rows,) = (value for name, value in one.items() if name.endswith("C3.weight") and name.startswith("model"))
        assert torch.equal(rows[0], torch.zeros(8))
        torch.testing.assert_close(rows[1:] / rows[1:].norm(), vectors[:, :8] / vectors[:, :8].norm())


@pytest.mark.parametrize(("heads", "has_hot_rows"), [({}, True), ({"C1": 0.7, "C2": 0.4}, True), ({"C1": 0.55, "C2": 0.4}, False)])
def test_hot_rows_are_for_ids_of_which_few_make_up_most_lookups(
    config_file: Path, heads: dict[str, float], has_hot_rows: bool
) -> None:
    config = load_config(config_file, ["tables.compression=10", "tables.tt_ranks=none", "tables.min_rows=100"])
    tables = table_configs(config, Schema(dense=("I1",), sparse={"C1": 20_000, "C2": 9000, "C3": 50}, heads=heads | {"C3": 1.0}))
    assert [bool(getattr(table, "hot_rows", ())) for table in tables] == [has_hot_rows, has_hot_rows, False]


@pytest.mark.parametrize("hot_rows", [(), ((20, 4),)])
def test_a_table_starts_from_what_it_can_represent(hot_rows: tuple[tuple[int, int], ...]) -> None:
    vectors = torch.kron(torch.randn(20, 1, 8), torch.ones(1, 30, 1)).flatten(0, 1)  # 20 groups of 30 equal ids
    table = TTEmbeddingBag(650, 16, tt_ranks=(8, 8), hot_rows=hot_rows)
    size = sum(core.numel() for core in table.parameters())
    importance = torch.arange(650, 0, -1)
    assert start_from_vectors_(table, vectors, importance)
    assert sum(core.numel() for core in table.parameters()) <= size
    rows = starting_rows(vectors, 650, 16)
    assert float(rows[:600].std()) == pytest.approx(0.1 / 2**0.5, rel=0.05)  # half of the columns are zero
    assert float((table.dense_matrix().detach() - rows).norm() / rows.norm()) < 0.6


def test_a_table_keeps_its_values_where_the_fit_is_poor() -> None:
    table = TTEmbeddingBag(600, 16, tt_ranks=(1, 1), hot_rows=((5, 1),))
    before = {name: value.clone() for name, value in table.state_dict().items()}
    assert not start_from_vectors_(table, torch.randn(600, 16))
    after = table.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
