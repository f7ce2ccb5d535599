"""TTEmbeddingCollection agrees with torchrec's EmbeddingCollection over dense tables; swapping, export, rank truncation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torchrec import (
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
)
from torchrec.fx import symbolic_trace

import comera_rec as cr
from comera_rec import TTEmbeddingCollection, TTEmbeddingConfig
from comera_rec.rank import truncate_ranks_

ROWS = {"seen": 900, "bought": 900, "site": 30}


def configs(**large: object) -> list[EmbeddingConfig]:
    """Configs with two features of one table, and one feature of two tables."""
    return [
        TTEmbeddingConfig(
            name="products", num_embeddings=900, embedding_dim=8, feature_names=["seen", "bought"], **(large or {"tt_ranks": 4})
        ),
        EmbeddingConfig(name="sites", num_embeddings=30, embedding_dim=8, feature_names=["site"]),
        EmbeddingConfig(name="seen twice", num_embeddings=900, embedding_dim=8, feature_names=["seen"]),
    ]


def dense_configs() -> list[EmbeddingConfig]:
    return [config.dense() if isinstance(config, TTEmbeddingConfig) else config for config in configs()]


def assert_same(actual: dict[str, JaggedTensor], expected: dict[str, JaggedTensor]) -> None:
    assert list(actual) == list(expected)
    for key, rows in expected.items():
        torch.testing.assert_close(actual[key].values(), rows.values())
        assert torch.equal(actual[key].lengths(), rows.lengths())


@pytest.mark.parametrize("large", [{"tt_ranks": 4}, {"tt_ranks": 3, "hot_rows": ((20, 4), (100, 1))}], ids=str)
@pytest.mark.parametrize("samples", [1, 7])
def test_rows_and_gradients_are_those_of_the_dense_tables(
    samples: int, large: dict[str, object], random_jagged: Callable[..., KeyedJaggedTensor]
) -> None:
    collection = TTEmbeddingCollection(configs(**large))
    for block in collection.tables.tt_bag("products").hot_blocks():
        nn.init.normal_(block.core_0)
    dense = cr.export_dense(collection)
    assert type(dense) is EmbeddingCollection
    features = random_jagged(ROWS, samples)
    actual, expected = collection(features), dense(features)
    assert list(actual) == ["seen@products", "bought", "site", "seen@seen twice"]
    assert_same(actual, expected)
    assert list(collection.embeddings) == list(dense.embeddings)
    for rows in (actual, expected):
        sum((k + 1) * each.values().square().sum() for k, each in enumerate(rows.values())).backward()
    bag = collection.tables.tt_bag("products")
    upstream = dense.embeddings["products"].weight.grad
    gradients = torch.autograd.grad(bag.dense_matrix(), list(bag.parameters()), upstream)
    torch.testing.assert_close([parameter.grad for parameter in bag.parameters()], list(gradients))
    for name in ("sites", "seen twice"):
        stored = collection.embeddings[name].weight
        torch.testing.assert_close(stored.grad, dense.embeddings[name].weight.grad)


def test_a_batch_without_ids() -> None:
    collection = TTEmbeddingCollection(configs())
    empty = KeyedJaggedTensor(keys=list(ROWS), values=torch.empty(0, dtype=torch.long), lengths=torch.zeros(6, dtype=torch.long))
    assert {key: tuple(rows.values().shape) for key, rows in collection(empty).items()} == dict.fromkeys(
        ["seen@products", "bought", "site", "seen@seen twice"], (0, 8)
    )


def test_no_feature_is_padded_to_the_longest() -> None:
    collection = TTEmbeddingCollection(configs())
    ids = {"seen": torch.randint(900, (500,)), "bought": torch.tensor([3]), "site": torch.tensor([7])}
    for lengths, variable in (
        (torch.tensor([250, 250, 1, 0, 0, 1]), {}),
        (torch.tensor([5] * 100 + [1, 1]), {"stride_per_key_per_rank": [[100], [1], [1]]}),
    ):
        features = KeyedJaggedTensor(keys=list(ids), values=torch.cat(list(ids.values())), lengths=lengths, **variable)
        assert collection.tables(features).values().shape == (2 * 500 + 1 + 1, 8)
        assert_same(collection(features), cr.export_dense(collection)(features))


def test_ids_are_returned_with_their_rows_on_request(random_jagged: Callable[..., KeyedJaggedTensor]) -> None:
    features = random_jagged(ROWS, 5)
    collection = TTEmbeddingCollection(configs(), need_indices=True)
    assert collection.need_indices()
    assert torch.equal(collection(features)["bought"].weights(), features["bought"].values())
    assert TTEmbeddingCollection(configs())(features)["bought"].weights_or_none() is None


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([], "tables is empty: give at least one table config"),
        ([configs()[0], EmbeddingConfig(name="b", num_embeddings=9, embedding_dim=4)], r"tables have dimensions \[4, 8\]"),
        ([configs()[0], configs()[0]], "two tables are named 'products'"),
    ],
)
def test_invalid_collections_are_refused(tables: list[EmbeddingConfig], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TTEmbeddingCollection(tables)


@pytest.mark.parametrize("init", ["random", "tt_svd"])
def test_swapped_into_a_model(init: str, random_jagged: Callable[..., KeyedJaggedTensor]) -> None:
    plain = EmbeddingCollection(dense_configs()[:2], use_gather_select=True)
    model = nn.ModuleDict({"sequences": plain})
    small, large = plain.embeddings["sites"].weight, plain.embeddings["products"].weight.detach()
    cr.compress_(model, tables=cr.TableCompression(tt_ranks=40, min_rows=100), init=init)
    swapped = model["sequences"]
    assert isinstance(swapped, TTEmbeddingCollection)
    assert swapped.use_gather_select()
    assert swapped.tables.dense_bags.use_gather_select()
    assert not TTEmbeddingCollection(configs()).use_gather_select()
    assert swapped.tables.embedding_bags["sites"].weight is small
    bag = swapped.tables.tt_bag("products")
    error = float((bag.dense_matrix().detach() - large).norm() / large.norm())
    assert error < 0.9 if init == "tt_svd" else error > 1.2
    features = random_jagged(ROWS, 4)
    assert_same(swapped(features), cr.export_dense(model)["sequences"](features))


class Rows(nn.Module):
    """Rows of two features from plain tensors, as exported programs take them."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, values: torch.Tensor, lengths: torch.Tensor) -> list[torch.Tensor]:
        rows = self.tables(KeyedJaggedTensor(["a", "b"], values, lengths=lengths))
        return [rows["a"].values(), rows["b"].values()]


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_collection_takes_sequences_of_any_length(strict: bool) -> None:
    tables = [TTEmbeddingConfig(name=name, num_embeddings=500, embedding_dim=8, feature_names=[name], tt_ranks=4) for name in "ab"]
    model, any_size = Rows(TTEmbeddingCollection(tables)), {0: torch.export.Dim.AUTO}
    lengths = torch.tensor([2, 0, 3, 1, 1, 2])
    exported = torch.export.export(model, (torch.arange(9), lengths), dynamic_shapes=(any_size, any_size), strict=strict).module()
    for lengths in (torch.tensor([0, 0, 1, 4, 1, 3]), torch.tensor([5, 0, 1, 400, 1, 2, 0, 9])):
        values = torch.arange(int(lengths.sum()))
        torch.testing.assert_close(exported(values, lengths), model(values, lengths))


def test_traced_and_truncated(random_jagged: Callable[..., KeyedJaggedTensor]) -> None:
    model = nn.Sequential(TTEmbeddingCollection(configs()))
    features = random_jagged(ROWS, 6)
    assert_same(symbolic_trace(model)(features), model(features))
    with torch.no_grad():
        model[0].tables.tt_bag("products").rank_1[:2] = 0
    before = model(features)
    assert truncate_ranks_(model, threshold=0.5) == {"0.tables.tt_bags.products": (2,)}
    assert_same(model(features), before)
