"""Dense copies make the same predictions as their originals; reports of both agree with their state dicts."""

import json
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from jagged import random_jagged
from processes import run
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

import comera_rec as cr
from comera_rec.nn import named_tt_modules, replace_modules_
from comera_rec.rank import truncate_ranks_


def tables() -> list[EmbeddingBagConfig]:
    return [
        cr.TTEmbeddingBagConfig(name="t1", num_embeddings=401, embedding_dim=16, feature_names=["f1"], tt_ranks=(3, 4)),
        EmbeddingBagConfig(name="t2", num_embeddings=30, embedding_dim=16, feature_names=["f2"]),
    ]


def dlrm() -> nn.Module:
    """Build a model whose rank parameters differ from 1."""
    model = cr.build_dlrm(tables(), dense_in_features=5, dense_arch_layer_sizes=[128, 128, 16], over_arch_layer_sizes=[128, 1])
    for rank in (rank for _, module in named_tt_modules(model) for rank in module.rank_parameters()):
        nn.init.uniform_(rank, 0.5, 1.5)
    return model


def test_shared_modules_stay_shared_and_modes_are_kept() -> None:
    layer, bag = cr.TTLinear(16, 16, tt_ranks=4), cr.TTEmbeddingBag(50, 16, mode="max", include_last_offset=True)
    model = nn.ModuleDict({"first": layer, "body": nn.Sequential(layer, nn.ReLU()), "bag": bag}).eval()
    dense = cr.export_dense(model)
    assert type(dense["first"]) is nn.Linear
    assert dense["first"] is dense["body"][0]
    assert (type(dense["bag"]), dense["bag"].mode, dense["bag"].include_last_offset) == (nn.EmbeddingBag, "max", True)
    assert not any(module.training for module in dense.modules())


def test_fused_dense_tables_are_also_exported() -> None:
    model = dlrm()
    collection = model.sparse_arch.embedding_bag_collection  # type: ignore[union-attr]
    stock = collection.dense_bags
    fused = FusedEmbeddingBagCollection(stock.embedding_bag_configs(), torch.optim.SGD, {"lr": 0.1})
    fused.load_state_dict(stock.state_dict())
    replace_modules_(model, {stock: fused})
    assert {layer.kind for layer in cr.compression_report(model).layers if "embedding_bag" in layer.name} == {"table"}
    inputs = torch.randn(9, 5), random_jagged({"f1": 401, "f2": 30}, 9)
    expected = model(*inputs)
    dense = cr.export_dense(model)
    assert not any(isinstance(m, FusedEmbeddingBagCollection) for m in dense.modules())
    torch.testing.assert_close(dense(*inputs), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(cr.export_dense(nn.Sequential(fused))(inputs[1]).values(), fused(inputs[1]).values())


def load_without_this_library(process_rank: int, file: str) -> None:
    """Load models where whatever needs this library raises ImportError, and compare their outputs."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "comera_rec"]:
        sys.modules[name] = None  # type: ignore[assignment]
    for name, (model, inputs, expected) in torch.load(file, weights_only=False).items():
        torch.testing.assert_close(model(*inputs), expected, rtol=0, atol=1e-5, msg=name)
        homes = {type(module).__module__.partition(".")[0] for module in model.modules()}
        assert homes == {"torch", "torchrec"}, (name, homes)


def test_built_models_load_without_this_library(tmp_path: Path) -> None:
    exported, sparse = {}, random_jagged({"f1": 401, "f2": 30}, 9)
    for architecture, dense in product(("dlrm", "dcn"), (5, 0)):
        sizes: dict[str, Any] = {"dense_arch_layer_sizes": [128, 16], "over_arch_layer_sizes": [128, 1], "cross_rank": 4}
        model = cr.build_dlrm(tables(), dense_in_features=dense, cross_layers=2 if architecture == "dcn" else 0, **sizes)
        inputs = torch.randn(9, dense), sparse
        before = {name: value.clone() for name, value in model.state_dict().items()}
        plain = cr.export_dense(model)
        exported[f"{architecture}, {dense}"] = plain, inputs, model(*inputs).detach()
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
        assert not {each.data_ptr() for each in plain.parameters() if len(each)} & {each.data_ptr() for each in model.parameters()}
    file = tmp_path / "models.pt"
    torch.save(exported, file)
    run(1, load_without_this_library, str(file))


def truncated(ranks: slice) -> nn.Module:
    model = dlrm()
    with torch.no_grad():
        model.sparse_arch.embedding_bag_collection.tt_bag("t1").rank_1[ranks] = 0.0  # type: ignore[union-attr, operator]
    truncate_ranks_(model, threshold=0.1)
    return model


def swapped() -> nn.Module:
    tables = [EmbeddingBagConfig(name="t", num_embeddings=500, embedding_dim=8, feature_names=["f"])]
    return cr.compress_(nn.Sequential(EmbeddingBagCollection(tables)), tables=cr.TableCompression(min_rows=1)).double()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "DLRM": dlrm,
    "truncated": lambda: truncated(slice(2)),
    "vanished": lambda: truncated(slice(None)),
    "swapped": swapped,
    "exported": lambda: cr.export_dense(dlrm()),
    "without tables": lambda: nn.LayerNorm(4),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_and_the_total_equal_the_state_dict(name: str) -> None:
    model = MODELS[name]()
    report, state = cr.compression_report(model), model.state_dict()
    for layer in report.layers:
        prefix = f"{layer.name}." if layer.name else ""
        own = [tensor for name, tensor in state.items() if name.rpartition(".")[0] == prefix[:-1]]
        assert own
        assert layer.params == sum(tensor.numel() for tensor in own)
        assert layer.bytes == sum(tensor.numel() * tensor.element_size() for tensor in own)
        assert layer.ratio == (layer.dense_bytes / layer.bytes if layer.bytes else float("inf"))
    assert report.total("params") == sum(tensor.numel() for tensor in state.values())
    assert report.total("bytes") == sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    assert report.total("params") == sum(report.total("params", kind=kind) for kind in ("table", "linear", "other"))
    exported = cr.compression_report(cr.export_dense(model))
    assert report.ratio == exported.total("bytes") / report.total("bytes")
    for size, kind in product(("params", "bytes"), (None, "table", "linear", "other")):
        assert report.total(f"dense_{size}", kind=kind) == exported.total(size, kind=kind)


def test_to_dict_is_plain_and_to_markdown_has_a_row_per_layer() -> None:
    model = dlrm()
    report = cr.compression_report(model)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | cr.TTLinear)}
    assert {layer.name for layer in report.layers if layer.kind == "linear"} == linears.keys()
    assert {layer.format for layer in report.layers if layer.ranks is None} == {"dense"}
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["params"] == report.total("params")
    assert plain["table_bytes"] == report.total("bytes", kind="table")
    assert plain["dense_table_bytes"] == report.total("dense_bytes", kind="table") == 4 * 16 * (401 + 30)
    assert [entry["ratio"] for entry in plain["layers"]] == [layer.ratio for layer in report.layers]
    assert "Infinity" not in json.dumps(cr.compression_report(truncated(slice(None))).to_dict())
    tied = nn.ModuleDict({"ids": nn.Embedding(50, 8), "scores": nn.Linear(8, 50)})
    tied["scores"].weight = tied["ids"].weight
    assert cr.compression_report(tied).total("params") == 50 * 8 + 50
    lines = report.to_markdown().splitlines()
    assert len(lines) == 2 + len(report.layers) + 1
    assert lines[3].startswith("| sparse_arch.embedding_bag_collection.tt_bags.t1 | 401 x 16 | tt | 3 4 | ")
    assert f"{report.total('bytes'):,}" in lines[-1]
