"""Row orders of tables that `compress_` makes: given ones, and those of similar trained rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import comera_rec as cr
from comera_rec.convert.row_order import similar_rows

DIM = 12


def groups(rows: int, number: int = 40) -> Tensor:
    """Rows of as many meanings, in random order, the first of them longer."""
    meanings = torch.randn(number, DIM) * torch.linspace(2, 1, DIM)
    return meanings[torch.randint(number, (rows,))] + 0.05 * torch.randn(rows, DIM)


def dense(rows: dict[str, Tensor]) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=len(each), embedding_dim=DIM, feature_names=[name])
        for name, each in rows.items()
    ]
    model = EmbeddingBagCollection(configs)
    for name, each in rows.items():
        model.embedding_bags[name].weight.data = each
    return model


def test_similar_rows_of_trained_tables_become_neighbors() -> None:
    """The order's bytes are part of the compression; rows that have nothing in common keep theirs."""
    rows = {"groups": groups(4000), "noise": torch.randn(4000, DIM)}
    errors = {}
    for row_order in (None, "similarity"):
        tables = cr.TableCompression(compression=11, min_rows=1)
        model = cr.compress_(dense(rows), tables=tables, init="tt_svd", row_order=row_order)
        report = cr.compression_report(model)
        assert report.ratio >= 11
        assert report.total("dense_bytes") == 8000 * DIM * 4
        errors[row_order] = (model.tt_bag("groups").dense_matrix() - rows["groups"]).detach().norm()
    assert model.tt_bag("groups").row_order is not None
    assert model.tt_bag("noise").row_order is None
    assert errors["similarity"] < 0.8 * errors[None]
    ids = KeyedJaggedTensor(["groups", "noise"], torch.randint(4000, (20,)), lengths=torch.full((4,), 5))
    torch.testing.assert_close(cr.export_dense(model)(ids).values(), model(ids).values())


def test_given_orders_count_in_the_compression() -> None:
    rows = {"groups": groups(4000), "other": torch.randn(4000, DIM)}
    order = similar_rows(rows["groups"])
    tables = cr.TableCompression(compression=6, min_rows=1)
    model = cr.compress_(dense(rows), tables=tables, row_order={"groups": order})
    assert model.tt_bag("groups").row_order.equal(order.int())
    assert model.tt_bag("other").row_order is None
    assert cr.compression_report(model).ratio >= 6
    for row_order, init, message in [
        ({"else": order}, "random", "row_order names 'else'"),
        ("similarity", "random", "'similarity' with init='tt_svd'"),
        ({"other": order[1:]}, "random", "give each of the numbers 0 to 3999 once"),
    ]:
        with pytest.raises(ValueError, match=message):
            cr.compress_(dense(rows), tables=tables, init=init, row_order=row_order)
