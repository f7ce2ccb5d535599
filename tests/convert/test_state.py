"""State dicts of other people's models: compressing them gives the state dict of the swapped model."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim import RowWiseAdagrad

import comera_rec as cr
from comera_rec.cli.main import main
from comera_rec.convert import compress_state, row_importance

SIZES = {"user": 2000, "item": 900, "day": 7}


def configs() -> list[EmbeddingBagConfig]:
    return [EmbeddingBagConfig(name=n, num_embeddings=m, embedding_dim=8, feature_names=[n]) for n, m in SIZES.items()]


def model(seed: int = 0) -> nn.Module:
    """Build tables of falling spectra, whose first rows stand out, and a layer."""
    torch.manual_seed(seed)
    actual = nn.ModuleDict({"sparse": EmbeddingBagCollection(configs()), "over": nn.Linear(3, 2)})
    with torch.no_grad():
        for table in ("user", "item"):
            weight = actual["sparse"].embedding_bags[table].weight  # type: ignore[union-attr, index]
            weight.copy_(torch.randn(len(weight), 3) @ torch.randn(3, 8))
            weight[:50] += 3 * torch.randn(50, 8)
    return actual


def weighted_error(
    state: dict[str, Tensor], dense: dict[str, Tensor], config: cr.TableCompression, weights: dict[str, Tensor]
) -> float:
    swapped = cr.compress_(model(1), tables=config)
    swapped.load_state_dict(state)
    exported = cr.export_dense(swapped).state_dict()
    keys = {table: f"sparse.embedding_bags.{table}.weight" for table in ("user", "item")}
    return sum(float((weights[t][:, None] * (exported[k] - dense[k]).square()).sum()) for t, k in keys.items())


@pytest.mark.parametrize("hot_rows", [0, 0.6])
def test_the_swapped_model_loads_it_and_predicts_nearly_the_same(hot_rows: float) -> None:
    dense, config = model().state_dict(), cr.TableCompression(compression=3, min_rows=100, hot_rows=hot_rows)
    state = compress_state(dense, config)
    assert torch.equal(state["over.weight"], dense["over.weight"])
    assert torch.equal(state["sparse.dense_bags.embedding_bags.day.weight"], dense["sparse.embedding_bags.day.weight"])
    num_params = sum(value.numel() for key, value in state.items() if key.startswith("sparse."))
    assert num_params <= sum(SIZES.values()) * 8 / 3
    even = {table: torch.ones(rows) for table, rows in SIZES.items()}
    norm = sum(float(value.square().sum()) for key, value in dense.items() if "embedding_bags" in key)
    assert weighted_error(state, dense, config, even) < (0.35 if hot_rows else 0.6) * norm


def test_important_rows_are_approximated_best() -> None:
    dense, config = model().state_dict(), cr.TableCompression(compression=8, min_rows=100, hot_rows=0.5)
    weights = {table: 1.0 / torch.arange(1, rows + 1) for table, rows in SIZES.items()}
    errors = [weighted_error(compress_state(dense, config, importance=rows), dense, config, weights) for rows in (weights, None)]
    assert errors[0] < 0.8 * errors[1]


def fused_optimizer() -> dict[str, Any]:
    fused = FusedEmbeddingBagCollection(configs(), RowWiseAdagrad, {"lr": 0.1}, device=torch.device("cpu"))
    state = fused.fused_optimizer().state_dict()
    for name, values in state["state"].items():
        for key in values:
            if key.endswith("momentum_1"):
                values[key].fill_(len(name))
    return state


def test_sums_of_fused_tables_are_found() -> None:
    actual = row_importance(fused_optimizer())
    assert {table: rows.shape for table, rows in actual.items()} == {table: (rows,) for table, rows in SIZES.items()}
    assert all(rows.unique().numel() == 1 for rows in actual.values())
    flat = {"optim.state.sparse.embedding_bags.user.weight.user.momentum1": torch.ones(5), "optim.lr": torch.tensor(0.1)}
    assert row_importance(flat).keys() == {"user"}


@pytest.mark.parametrize("kind", ["file", "distributed checkpoint"])
def test_compress_takes_files_and_distributed_checkpoints(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense, source = model().state_dict(), tmp_path / "model"
    if kind == "file":
        torch.save({"model": dense, "epoch": 3}, source)
    else:
        with warnings.catch_warnings(action="ignore"):
            dcp.save({"model": dense}, checkpoint_id=str(source), no_dist=True)
    torch.save(fused_optimizer(), tmp_path / "optimizer.pt")
    torch.save(torch.ones(3), tmp_path / "tensor.pt")
    arguments = ["compress", "--state", str(source), "--optimizer", str(tmp_path / "optimizer.pt"), "--output"]
    small, tables = tmp_path / "small.pt", ["tables.compression=4", "tables.min_rows=100"]
    with pytest.raises(SystemExit) as stop:
        main([*arguments, str(small), *tables])
    assert stop.value.code in (0, None)
    assert "x smaller)" in capsys.readouterr().out
    state = torch.load(small, weights_only=True)
    config = cr.TableCompression(compression=4, min_rows=100)
    swapped = cr.compress_(model(1), tables=config)
    if kind == "distributed checkpoint":  # which has no nested levels
        swapped = nn.ModuleDict({"model": swapped})
    swapped.load_state_dict(state)
    for again, message in (
        ([*arguments, str(small), *tables], "exists: give a new file"),
        ([*arguments, str(tmp_path / "new.pt"), "tables.ranks=4"], "unknown key tables.ranks; did you mean tables.tt_ranks?"),
        ([*arguments, str(tmp_path / "new.pt"), "model.dim=4"], "override of model: only tables.key=value is allowed here"),
        (["compress", "--state", str(tmp_path / "no"), "--output", str(tmp_path / "new.pt")], "does not exist"),
        (["compress", "--state", str(tmp_path), "--output", str(tmp_path / "new.pt")], "holds no .metadata"),
        (
            ["compress", "--state", str(tmp_path / "tensor.pt"), "--output", str(tmp_path / "new.pt")],
            "holds a Tensor: give a state dict",
        ),
        (["compress", "--output", str(tmp_path / "new.pt")], "give --checkpoint and --config, or --state"),
        ([*arguments, str(tmp_path / "no" / "new.pt"), *tables], "is not a folder: create it"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(again)
        assert stop.value.code == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "new.pt").exists()


def test_entries_that_are_no_tensors_are_kept() -> None:
    state = {**model().state_dict(), "over._extra_state": {"scale": 2}}
    compressed = compress_state(state, cr.TableCompression(compression=4, min_rows=100))
    assert compressed["over._extra_state"] == {"scale": 2}


def test_states_without_tables_are_refused() -> None:
    config = cr.TableCompression(compression=4, min_rows=100)
    with pytest.raises(ValueError, match="holds no table"):
        compress_state({"over.weight": torch.ones(2, 2)}, config)
    with pytest.raises(ValueError, match="no table with an unshared weight has at least 100 rows: lower min_rows"):
        compress_state({"embedding_bags.day.weight": torch.ones(7, 8)}, cr.TableCompression(tt_ranks=2, min_rows=100))
    rows = {"user": torch.ones(5), "item": torch.ones(900)}
    with pytest.raises(ValueError, match=r"importance of 'user' has shape \(5,\): give 2000 numbers"):
        compress_state(model().state_dict(), config, importance=rows)
    with pytest.raises(ValueError, match=r"importance lacks item: give it for all tables that are compressed, or for none"):
        compress_state(model().state_dict(), config, importance={"user": torch.ones(2000)})
    for bad in (-1.0, torch.nan):
        with pytest.raises(ValueError, match="importance of 'item' holds numbers that are not finite or below 0"):
            compress_state(model().state_dict(), config, importance={"user": torch.ones(2000), "item": torch.full((900,), bad)})
    with pytest.raises(ValueError, match=r"t.weight holds numbers that are not finite: give"):
        compress_state({"embedding_bags.t.weight": torch.full((200, 8), torch.inf)}, config)
    swapped = cr.compress_(model(), tables=config)
    with pytest.raises(ValueError, match=r"day.weight is a dense table beside TT tables: give .* before it was compressed"):
        compress_state(swapped.state_dict(), config)
    with pytest.raises(ValueError, match=r"t.weight holds torch.int8: give a table of floating point numbers"):
        compress_state({"embedding_bags.t.weight": torch.ones(200, 8, dtype=torch.int8)}, config)


def test_layers_that_a_swap_leaves_alone_keep_their_names() -> None:
    """A collection without large tables and tables that share their weight are left alone."""

    def build() -> nn.Module:
        actual = model()
        actual["small"] = EmbeddingBagCollection(  # type: ignore[operator]
            [EmbeddingBagConfig(name="day", num_embeddings=7, embedding_dim=8, feature_names=["d"])]
        )
        actual["tied"] = nn.Embedding(2000, 8)  # type: ignore[operator]
        actual["tied"].weight = actual["sparse"].embedding_bags["user"].weight  # type: ignore[index, union-attr, assignment]
        return actual

    config = cr.TableCompression(tt_ranks=2, min_rows=100)
    state = compress_state(build().state_dict(), config)
    assert "sparse.dense_bags.embedding_bags.user.weight" in state
    assert "small.embedding_bags.day.weight" in state
    cr.compress_(build(), tables=config).load_state_dict(state)


@pytest.mark.parametrize("hot_rows", [0, 0.5])
def test_large_tables_of_halves_stay_finite(hot_rows: float) -> None:
    """Their norms exceed the largest half."""
    torch.manual_seed(0)
    weight = (1000 * torch.randn(2000, 2) @ torch.randn(2, 8)).half()
    config = cr.TableCompression(compression=3, min_rows=9, hot_rows=hot_rows)
    state = compress_state({"embedding_bags.t.weight": weight}, config)
    assert all(value.isfinite().all() for value in state.values())
