"""build_dlrm: torchrec's own model with large parts as TT modules, which learns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM

from comera_rec import (
    LinearCompression,
    TableCompression,
    TTEmbeddingBagCollection,
    TTEmbeddingBagConfig,
    TTLinear,
    build_dlrm,
    export_dense,
)
from comera_rec.recsys import build_deepfm, build_wide_deep, wide_tables
from comera_rec.training.model import materialize_


def tables() -> list[EmbeddingBagConfig]:
    return [
        TTEmbeddingBagConfig(name="t1", num_embeddings=5000, embedding_dim=16, feature_names=["f1"], tt_ranks=8),
        EmbeddingBagConfig(name="t2", num_embeddings=30, embedding_dim=16, feature_names=["f2"]),
    ]


def build(**arguments: object) -> DLRM:
    defaults = {"dense_in_features": 5, "dense_arch_layer_sizes": [128, 128, 16], "over_arch_layer_sizes": [256, 128, 1]}
    return build_dlrm(tables(), **{**defaults, **arguments})  # type: ignore[arg-type]


def test_large_layers_are_tt_layers_and_small_ones_dense(random_jagged: Callable[..., KeyedJaggedTensor]) -> None:
    model = build()
    assert type(model) is DLRM
    assert isinstance(model.sparse_arch.embedding_bag_collection, TTEmbeddingBagCollection)
    assert list(model.sparse_arch.embedding_bag_collection.tt_bags) == ["t1"]
    tt_layers = sorted((m.in_features, m.out_features) for m in model.modules() if isinstance(m, TTLinear))
    dense = sorted((m.in_features, m.out_features) for m in model.modules() if type(m) is nn.Linear)
    assert tt_layers == [(128, 128), (256, 128)]
    assert dense == [(5, 128), (19, 256), (128, 1), (128, 16)]
    logits = model(torch.randn(7, 5), random_jagged({"f1": 5000, "f2": 30}, 7))
    assert logits.shape == (7, 1)
    assert not any(isinstance(m, TTLinear) for m in build(linears=None).modules())
    assert not any(isinstance(m, TTLinear) for m in build(linears=LinearCompression(min_features=1000)).modules())


def test_it_learns(random_jagged: Callable[..., KeyedJaggedTensor]) -> None:
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    dense, sparse = torch.randn(256, 5), random_jagged({"f1": 5000, "f2": 30}, 256)
    labels = (dense[:, 0] + sparse["f2"].lengths() > 2).float()
    losses = []
    for _ in range(30):
        loss = F.binary_cross_entropy_with_logits(model(dense, sparse).squeeze(1), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_meta_device() -> None:
    assert all(parameter.is_meta for parameter in build(device="meta").parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dense_in_features": -1}, "dense_in_features is -1: give how many there are, or 0"),
        ({"cross_layers": -1}, "cross_layers is -1: give a number of layers, or 0"),
        ({"dense_arch_layer_sizes": []}, "dense_arch_layer_sizes is empty: give at least one layer size"),
        ({"over_arch_layer_sizes": [64, -1]}, r"over_arch_layer_sizes\[1\] is -1: give a positive integer"),
        ({"dense_arch_layer_sizes": [64, 8]}, r"tables have dimensions \[16\] and dense_arch_layer_sizes ends with 8"),
    ],
)
def test_mistakes_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**arguments)


def test_no_tables_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="tables is empty"):
        build_dlrm([], dense_in_features=5, dense_arch_layer_sizes=[16], over_arch_layer_sizes=[1])
    with pytest.raises(ValueError, match="tables is empty"):
        build_deepfm([], dense_in_features=5, hidden_layer_size=16, deep_fm_dimension=8)


def deepfm(**arguments: object) -> nn.Module:
    sizes = {"dense_in_features": 5, "hidden_layer_size": 32, "deep_fm_dimension": 256}
    return build_deepfm(tables(), **{**sizes, **arguments})  # type: ignore[arg-type]


def wide_deep(**arguments: object) -> nn.Module:
    wide = TableCompression(tt_ranks=2, min_rows=1000).table_configs(wide_tables(tables()))
    return build_wide_deep(tables(), **{"dense_in_features": 5, "deep_layer_sizes": [64, 32], "wide": wide, **arguments})  # type: ignore[arg-type]


ARCHITECTURES = {
    "dot products": build,
    "cross network": partial(build, cross_layers=2, cross_rank=4),
    "DeepFM": deepfm,
    "Wide & Deep": wide_deep,
}


@pytest.mark.parametrize("dense", [5, 0])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_learns_and_is_exported(name: str, dense: int, random_jagged: Callable[..., KeyedJaggedTensor]) -> None:
    model = ARCHITECTURES[name](dense_in_features=dense, linears=LinearCompression(tt_ranks=4, min_features=32, policy="always"))
    assert any(isinstance(module, TTLinear) for module in model.modules())
    inputs = torch.randn(64, dense), random_jagged({"f1": 5000, "f2": 30}, 64)
    labels = (inputs[1]["f2"].lengths() > 2).float()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(60):
        logits = model(*inputs)
        assert logits.shape == (64, 1)
        loss = F.binary_cross_entropy_with_logits(logits.squeeze(1), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert float(model(*inputs).detach().min()) < 0, "logits, not probabilities"
    torch.testing.assert_close(export_dense(model)(*inputs), model(*inputs), atol=1e-4, rtol=1e-4)
    on_meta = ARCHITECTURES[name](dense_in_features=dense, device="meta")
    assert all(parameter.is_meta for parameter in on_meta.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dense_in_features": -1}, "dense_in_features is -1: give how many there are, or 0"),
        ({"hidden_layer_size": 0}, "hidden_layer_size is 0: give a positive integer"),
    ],
)
def test_mistakes_of_deepfm_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        deepfm(**arguments)


def test_the_wide_part_has_one_weight_per_id(random_jagged: Callable[..., KeyedJaggedTensor]) -> None:
    model = wide_deep(dense_in_features=0).eval()
    assert list(model.wide_arch.embedding_bag_collection.tt_bags) == ["wide_t1"]
    sparse = random_jagged({"f1": 5000, "f2": 30}, 7)
    with torch.no_grad():
        deep = model.deep_arch(model.sparse_arch(sparse).values()).squeeze(1)
        difference = model(torch.empty(7, 0), sparse).squeeze(1) - deep
    expected = torch.zeros(7)
    for feature, table in (("f1", "wide_t1"), ("f2", "wide_t2")):
        bag = model.wide_arch.embedding_bag_collection.embedding_bags[table]
        weights = bag.dense_matrix().detach() if table == "wide_t1" else bag.weight.detach()
        for sample, ids in enumerate(sparse[feature].to_dense()):
            expected[sample] += weights[ids].sum()
    torch.testing.assert_close(difference, expected, rtol=0, atol=1e-6)


def test_hashed_ids_share_weights() -> None:
    model = build_wide_deep(tables(), dense_in_features=0, deep_layer_sizes=[], buckets=100)
    wide = model.wide_arch.embedding_bag_collection
    assert {name: bag.num_embeddings for name, bag in wide.embedding_bags.items()} == {"wide_t1": 100, "wide_t2": 30}

    def weight_of(row: int) -> Tensor:
        feature = KeyedJaggedTensor(["f1", "f2"], torch.tensor([row]), lengths=torch.tensor([1, 0]))
        difference: Tensor = model(torch.empty(1, 0), feature) - model.deep_arch(model.sparse_arch(feature).values())
        return difference.detach()

    torch.testing.assert_close(weight_of(4207), weight_of(7), rtol=0, atol=1e-6)
    assert (weight_of(4208) - weight_of(7)).abs() > 1e-5
    with pytest.raises(ValueError, match="buckets is -1: give the largest number of weights per table, or 0 for one per id"):
        build_wide_deep(tables(), dense_in_features=0, deep_layer_sizes=[], buckets=-1)


def test_a_cross_network_is_materialized_and_initialized_as_torchrec_does() -> None:
    torch.manual_seed(0)
    model = build(cross_layers=2, cross_rank=8, device="meta")
    network = materialize_(model, torch.device("cpu")).inter_arch.crossnet
    for kernel in (*network.V_kernels, *network.W_kernels):
        assert kernel.detach().std().item() == pytest.approx((2 / sum(kernel.shape)) ** 0.5, rel=0.2)
    assert not any(bias.any() for bias in network.bias)


def test_wide_tables_refuse_names_that_meet() -> None:
    configs = [EmbeddingBagConfig(name=n, num_embeddings=9, embedding_dim=4, feature_names=[n]) for n in ("x", "wide_x")]
    with pytest.raises(ValueError, match="tables 'x' and 'wide_x' would share the name 'wide_x': rename one"):
        wide_tables(configs)


def test_table_names_that_hide_attributes_of_modules_are_refused() -> None:
    with pytest.raises(ValueError, match="table name 'training' can't name a submodule"):
        TTEmbeddingBagCollection([EmbeddingBagConfig(name="training", num_embeddings=9, embedding_dim=4, feature_names=["f"])])
