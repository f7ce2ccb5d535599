"""build_dlrm: torchrec's own model with large parts as TT modules, which learns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM

from comera_rec import (
    LinearCompression,
    TTEmbeddingBagCollection,
    TTEmbeddingBagConfig,
    TTLinear,
    build_dlrm,
    export_dense,
)
from comera_rec.training.model import materialize_


def tables() -> list[EmbeddingBagConfig]:
    return [
        TTEmbeddingBagConfig(name="t1", num_embeddings=5000, embedding_dim=16, feature_names=["f1"], tt_ranks=8),
        EmbeddingBagConfig(name="t2", num_embeddings=30, embedding_dim=16, feature_names=["f2"]),
    ]


def build(**arguments: object) -> DLRM:
    defaults = {"dense_in_features": 5, "dense_arch_layer_sizes": [128, 128, 16], "over_arch_layer_sizes": [256, 128, 1]}
    return build_dlrm(**{"tables": tables(), **defaults, **arguments})  # type: ignore[arg-type]


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


ARCHITECTURES = {
    "dot products": build,
    "cross network": partial(build, cross_layers=2, cross_rank=4),
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
    ("make", "arguments", "message"),
    [
        (build, {"dense_in_features": -1}, "dense_in_features is -1: give how many there are, or 0"),
        (build, {"cross_layers": -1}, "cross_layers is -1: give a number of layers, or 0"),
        (build, {"dense_arch_layer_sizes": []}, "dense_arch_layer_sizes is empty: give at least one layer size"),
        (build, {"over_arch_layer_sizes": [64, -1]}, r"over_arch_layer_sizes\[1\] is -1: give a positive integer"),
        (build, {"dense_arch_layer_sizes": [64, 8]}, r"tables have dimensions \[16\] and dense_arch_layer_sizes ends with 8"),
        (build, {"tables": []}, "tables is empty"),
    ],
)
def test_mistakes_are_named(make: Callable[..., nn.Module], arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**arguments)


def test_a_cross_network_is_materialized_and_initialized_as_torchrec_does() -> None:
    torch.manual_seed(0)
    model = build(cross_layers=2, cross_rank=8, device="meta")
    network = materialize_(model, torch.device("cpu")).inter_arch.crossnet
    for kernel in (*network.V_kernels, *network.W_kernels):
        assert kernel.detach().std().item() == pytest.approx((2 / sum(kernel.shape)) ** 0.5, rel=0.2)
    assert not any(bias.any() for bias in network.bias)
