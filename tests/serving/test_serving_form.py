"""Tables, layers and whole models in serving form."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)  # fmt: skip

import comera_rec as cr
from comera_rec.nn import TTModule
from comera_rec.ops.served_bags.reference import rows_of
from comera_rec.rank import truncate_ranks_
from comera_rec.serving.forms import FORMS, serving_copy, serving_layer
from comera_rec.serving.tables import served_table


@pytest.fixture
def collection() -> cr.TTEmbeddingBagCollection:
    """A TT table of each order with hot rows, narrow and full-width, and a dense table with two features."""
    shapes = {
        2: cr.TTShape((40, 30), (4, 2), 3),
        3: cr.TTShape((12, 10, 10), (2, 2, 2), (2, 3)),
        4: cr.TTShape((6, 6, 6, 6), (2, 1, 2, 2), 2),
    }
    tables = [
        cr.TTEmbeddingBagConfig(
            name=f"t{order}",
            num_embeddings=1111,
            embedding_dim=8,
            feature_names=[f"f{order}"],
            shape=shape,
            hot_rows=((20, 8), (300, 2)),
            pooling=PoolingType.MEAN,
        )
        for order, shape in shapes.items()
    ]
    tables.append(cr.TTEmbeddingBagConfig(name="d", num_embeddings=30, embedding_dim=8, feature_names=["a", "b"]))
    made = cr.TTEmbeddingBagCollection(tables)
    for name, parameter in made.named_parameters():
        nn.init.normal_(parameter) if "hot_rows" in name or "rank" in name else None
    return made


def test_served_rows_are_the_tables(collection: cr.TTEmbeddingBagCollection) -> None:
    for name in ("t2", "t3", "t4"):
        table = served_table(collection.tt_bag(name))
        assert len(table.formed) == 20
        matrix = collection.tt_bag(name).dense_matrix().detach()
        torch.testing.assert_close(rows_of(table, torch.arange(1111)), matrix, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("emptied", ["t2$", "t.$", r"t2.hot_rows.1", "t..hot_rows", "t"])
@torch.no_grad()
def test_parts_truncated_to_rank_0_add_nothing(form: str, emptied: str, collection: cr.TTEmbeddingBagCollection) -> None:
    for name, module in collection.tt_bags.named_modules():
        if isinstance(module, TTModule) and re.match(emptied, name):
            for rank in module.rank_parameters():
                rank.zero_()
    truncate_ranks_(collection, threshold=1e-12)
    features = [f"f{order}" for order in (2, 3, 4)] + ["a", "b"]
    lengths = torch.randint(0, 3, (5 * 7,))
    values = torch.cat([torch.randint(0, 1111 if k < 3 else 30, (int(lengths[7 * k : 7 * k + 7].sum()),)) for k in range(5)])
    batch = KeyedJaggedTensor(features, values, lengths=lengths)
    served, _ = serving_copy(collection, {"features": batch}, form, "float32")
    torch.testing.assert_close(served(batch).values(), collection(batch).values(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ranks", [2, 16])
def test_a_tt_layer_keeps_its_values(ranks: int) -> None:
    layer = cr.TTLinear(30, 20, tt_ranks=ranks)
    with torch.no_grad():
        for rank in layer.rank_parameters():
            nn.init.uniform_(rank)
    input = torch.randn(5, 30)
    torch.testing.assert_close(serving_layer(layer)(input), layer(input), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dense", [3, 0])
@pytest.mark.parametrize("architecture", ["dlrm", "dcn"])
def test_every_architecture_is_served(
    architecture: str, dense: int, collection: cr.TTEmbeddingBagCollection, random_jagged: Callable[..., KeyedJaggedTensor]
) -> None:
    linears, configs = cr.LinearCompression(tt_ranks=2, min_features=8, policy="always"), collection.embedding_bag_configs()
    sizes = {"dense_arch_layer_sizes": [16, 8], "over_arch_layer_sizes": [16, 1]}
    model = cr.build_dlrm(configs, dense_in_features=dense, linears=linears, cross_layers=2 * (architecture == "dcn"), **sizes)
    features = random_jagged({"f2": 1111, "f3": 1111, "f4": 1111, "a": 30, "b": 30}, 5)
    arguments = {"dense_features": torch.randn(5, dense), "sparse_features": features}
    with torch.no_grad():
        expected = model.eval()(**arguments)
        for form in FORMS:
            served, _ = serving_copy(model, arguments, form, "float32")
            assert not any(isinstance(module, TTModule) for module in served.modules())
            torch.testing.assert_close(served(**arguments), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_lookups_of_any_order_and_dimension(form: str, is_weighted: bool, random_jagged: Callable[..., KeyedJaggedTensor]) -> None:
    """A feature of two tables, one that isn't looked up, and tables of two dimensions, in another order than the batch's keys."""
    limits = {"a": 50, "unused": 10**6, "b": 40, "c": 30}
    tables = {"wide": (8, ["c", "a"]), "narrow": (4, ["b", "a"]), "small": (8, ["b"])}
    sizes = {name: {"name": name, "embedding_dim": dim, "feature_names": used} for name, (dim, used) in tables.items()}
    bags = EmbeddingBagCollection([EmbeddingBagConfig(num_embeddings=50, **each) for each in sizes.values()], is_weighted)
    bags = cr.compress_(bags, tables=cr.TableCompression(tt_ranks=2, min_rows=0)) if is_weighted else bags
    rows = EmbeddingCollection([EmbeddingConfig(num_embeddings=50, **each) for each in sizes.values() if each["name"] != "narrow"])
    batch = random_jagged(limits, 6, weighted=is_weighted)
    served, _ = serving_copy(bags, {"features": batch}, form, "float32")
    torch.testing.assert_close(served(batch).to_dict(), bags(batch).to_dict())
    served, _ = serving_copy(rows, {"features": batch}, form, "float32")
    expected = rows(batch)
    for name, found in served(batch).items():
        torch.testing.assert_close(found.values(), expected[name].values())
        assert found.lengths().equal(expected[name].lengths())
