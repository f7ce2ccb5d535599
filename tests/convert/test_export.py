"""export_dense: plain torch and TorchRec modules make the same predictions, and the original is unchanged."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch
from dlrm_models import dlrm, tables
from processes import run
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

from comera_rec import TTEmbeddingBag, TTEmbeddingBagCollection, TTLinear, build_dlrm, export_dense
from comera_rec.nn import replace_modules_


def test_shared_modules_stay_shared_and_modes_are_kept() -> None:
    layer, bag = TTLinear(16, 16, tt_ranks=4), TTEmbeddingBag(50, 16, mode="max", include_last_offset=True)
    model = nn.ModuleDict({"first": layer, "body": nn.Sequential(layer, nn.ReLU()), "bag": bag}).eval()
    dense = export_dense(model)
    assert type(dense["first"]) is nn.Linear
    assert dense["first"] is dense["body"][0]
    assert (type(dense["bag"]), dense["bag"].mode, dense["bag"].include_last_offset) == (nn.EmbeddingBag, "max", True)
    assert not any(module.training for module in dense.modules())


def test_fused_dense_tables_are_also_exported(random_jagged: Callable[..., KeyedJaggedTensor]) -> None:
    model = dlrm()
    collection = model.sparse_arch.embedding_bag_collection  # type: ignore[union-attr]
    stock = collection.dense_bags
    fused = FusedEmbeddingBagCollection(stock.embedding_bag_configs(), torch.optim.SGD, {"lr": 0.1})
    fused.load_state_dict(stock.state_dict())
    replace_modules_(model, {stock: fused})
    inputs = torch.randn(9, 5), random_jagged({"f1": 401, "f2": 30}, 9)
    expected = model(*inputs)
    dense = export_dense(model)
    assert not any(isinstance(m, FusedEmbeddingBagCollection) for m in dense.modules())
    torch.testing.assert_close(dense(*inputs), expected, rtol=0, atol=1e-5)


def build(architecture: str, dense: int) -> nn.Module:
    return build_dlrm(
        tables(), dense_in_features=dense, dense_arch_layer_sizes=[128, 16], over_arch_layer_sizes=[128, 1],
        cross_layers=2 if architecture == "dcn" else 0, cross_rank=4,
    )  # fmt: skip


def load_without_this_library(process_rank: int, file: str) -> None:
    """Load models where whatever needs this library raises ImportError, and compare their outputs."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "comera_rec"]:
        sys.modules[name] = None  # type: ignore[assignment]
    for name, (model, inputs, expected) in torch.load(file, weights_only=False).items():
        torch.testing.assert_close(model(*inputs), expected, rtol=0, atol=1e-5, msg=name)
        homes = {type(module).__module__.partition(".")[0] for module in model.modules()}
        assert homes == {"torch", "torchrec"}, (name, homes)


def test_built_models_load_without_this_library(tmp_path: Path, random_jagged: Callable[..., KeyedJaggedTensor]) -> None:
    exported, sparse = {}, random_jagged({"f1": 401, "f2": 30}, 9)
    for architecture, dense in product(("dlrm", "dcn"), (5, 0)):
        model, inputs = build(architecture, dense), (torch.randn(9, dense), sparse)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        plain = export_dense(model)
        exported[f"{architecture}, {dense}"] = plain, inputs, model(*inputs).detach()
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
        assert not {each.data_ptr() for each in plain.parameters() if len(each)} & {each.data_ptr() for each in model.parameters()}
    file = tmp_path / "models.pt"
    torch.save(exported, file)
    run(1, load_without_this_library, str(file))


def test_a_collection_of_no_tables() -> None:
    assert export_dense(TTEmbeddingBagCollection([])).embedding_bag_configs() == []
