"""Trained models, compressed within a budget: the error is that of the best ranks, least where rows matter most or are similar."""

import itertools
from typing import Any

import pytest
import torch
from refusals import refuse
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim import RowWiseAdagrad

import comera_rec as cr
from comera_rec import TTEmbeddingBag, TTShape
from comera_rec.convert import fit_tables_, row_importance
from comera_rec.convert.compress import similar_rows
from comera_rec.tt import tt_svd, tt_to_dense

SIZES = {"user": 2000, "item": 900, "day": 7}
DIM = 12
SHAPES = [TTShape((12, 10), (4, 4), 6), TTShape((15, 8), (4, 4), 6), TTShape((10, 9), (4, 4), 6)]


def dense(rows: dict[str, Tensor]) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=len(each), embedding_dim=each.shape[1], feature_names=[name])
        for name, each in rows.items()
    ]
    collection = EmbeddingBagCollection(configs)
    for name, each in rows.items():
        collection.embedding_bags[name].weight.data = each
    return collection


def model() -> nn.Module:
    """Build tables of falling spectra, whose first rows stand out."""
    torch.manual_seed(0)
    rows = {table: torch.randn(count, 3) @ torch.randn(3, 8) for table, count in SIZES.items()}
    for table in ("user", "item"):
        rows[table][:50] += 3 * torch.randn(50, 8)
    return nn.ModuleDict({"sparse": dense(rows)})


def compressed(tables: cr.TableCompression, importance: dict[str, Tensor] | None = None) -> nn.Module:
    return cr.compress_(model(), tables=tables, init="tt_svd", importance=importance)


def weighted_error(actual: nn.Module, weights: dict[str, Tensor]) -> float:
    exported, dense = cr.export_dense(actual).state_dict(), model().state_dict()
    keys = {table: f"sparse.embedding_bags.{table}.weight" for table in ("user", "item")}
    return sum(float((weights[t][:, None] * (exported[k] - dense[k]).square()).sum()) for t, k in keys.items())


@pytest.mark.parametrize("hot_rows", [0, 0.6])
def test_it_predicts_nearly_the_same_within_the_budget(hot_rows: float) -> None:
    small = compressed(cr.TableCompression(compression=3, min_rows=100, hot_rows=hot_rows))
    assert sum(parameter.numel() for parameter in small.parameters()) <= sum(SIZES.values()) * 8 / 3
    even = {table: torch.ones(rows) for table, rows in SIZES.items()}
    norm = sum(float(value.square().sum()) for value in model().state_dict().values())
    assert weighted_error(small, even) < (0.35 if hot_rows else 0.6) * norm


def test_important_rows_are_approximated_best() -> None:
    tables = cr.TableCompression(compression=8, min_rows=100, hot_rows=0.5)
    weights = {table: 1.0 / torch.arange(1, rows + 1) for table, rows in SIZES.items()}
    errors = [weighted_error(compressed(tables, importance), weights) for importance in (weights, None)]
    assert errors[0] < 0.8 * errors[1]


def fused_optimizer() -> dict[str, Any]:
    configs = model()["sparse"].embedding_bag_configs()
    fused = FusedEmbeddingBagCollection(configs, RowWiseAdagrad, {"lr": 0.1}, device=torch.device("cpu"))
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


def test_mistakes_are_named() -> None:
    tables = cr.TableCompression(compression=4, min_rows=100)
    rows = {"user": torch.ones(5), "item": torch.ones(900)}
    refuse(r"importance of 'user' has shape \(5,\): give 2000 finite numbers of at least 0", compressed, tables, rows)
    refuse("importance lacks 'item': give it for all tables that are compressed", compressed, tables, {"user": torch.ones(2000)})
    for bad in (-1.0, torch.nan):
        refuse("importance of 'item' has shape", compressed, tables, {"user": torch.ones(2000), "item": torch.full((900,), bad)})
    refuse("importance is given: it needs tables and init='tt_svd'", cr.compress_, model(), tables=tables, importance=rows)
    diverged = nn.Embedding(200, 8)
    nn.init.constant_(diverged.weight, torch.inf)
    refuse("'the model' holds numbers that are not finite: give", cr.compress_, diverged, tables=tables, init="tt_svd")


@pytest.mark.parametrize("hot_rows", [0, 0.5])
def test_large_tables_of_halves_stay_finite(hot_rows: float) -> None:
    """Their norms exceed the largest half."""
    torch.manual_seed(0)
    layer = nn.Embedding.from_pretrained((1000 * torch.randn(2000, 2) @ torch.randn(2, 8)).half())
    table = cr.compress_(layer, tables=cr.TableCompression(compression=3, min_rows=9, hot_rows=hot_rows), init="tt_svd")
    assert all(value.isfinite().all() for value in table.state_dict().values())
    layer = nn.Embedding.from_pretrained(torch.full((2000, 8), 6e4, dtype=torch.float16))
    tables = cr.TableCompression(compression=3, min_rows=9, hot_rows=hot_rows)
    for table in (cr.TTEmbedding.from_dense(layer), cr.compress_(layer, tables=tables, init="tt_svd")):
        torch.testing.assert_close(table(torch.arange(2000)), layer.weight, rtol=0.01, atol=0)


def groups(rows: int, number: int = 40) -> Tensor:
    """Rows of as many meanings, in random order, the first of them longer."""
    meanings = torch.randn(number, DIM) * torch.linspace(2, 1, DIM)
    return meanings[torch.randint(number, (rows,))] + 0.05 * torch.randn(rows, DIM)


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
    only = cr.TableCompression(compression=1.5, min_rows=1, dense_tables=("other",))
    assert sorted(cr.compress_(dense(rows), tables=only, row_order=dict.fromkeys(rows, order)).tt_bags) == ["groups"]
    model = cr.compress_(dense(rows), tables=tables, row_order={"groups": order})
    assert model.tt_bag("groups").row_order.equal(order.int())
    assert model.tt_bag("other").row_order is None
    assert cr.compression_report(model).ratio >= 6
    few = 0.9 * cr.TableCompression(min_rows=1).most_compression(model.embedding_bag_configs())
    with pytest.raises(ValueError, match=r"can't be reached.* or lower compression to (\S+)") as caught:
        cr.compress_(dense(rows), tables=cr.TableCompression(compression=few, min_rows=1), row_order={"groups": order})
    least = float(str(caught.value).rpartition(" ")[2])
    cr.compress_(dense(rows), tables=cr.TableCompression(compression=least, min_rows=1), row_order={"groups": order})
    # Orders that are chosen leave room for the tables.
    chosen = cr.TableCompression(compression=few, min_rows=1)
    assert cr.compress_(dense(rows), tables=chosen, init="tt_svd", row_order="similarity").tt_bag("groups").row_order is None
    small = {"groups": rows["groups"], "small": torch.randn(2000, DIM)}
    most = cr.TableCompression(min_rows=3000).most_compression(dense(small).embedding_bag_configs())
    chosen = cr.TableCompression(compression=most, min_rows=3000)
    assert cr.compress_(dense(small), tables=chosen, init="tt_svd", row_order="similarity").tt_bag("groups").row_order is None
    importance = dict.fromkeys(rows, torch.rand(4000).square())
    weighted = cr.compress_(dense(rows), tables=tables, init="tt_svd", row_order="similarity", importance=importance)
    assert weighted.tt_bag("groups").row_order.equal(similar_rows(rows["groups"], importance["groups"]).int())
    optimizer = torch.optim.Adam(model.parameters())
    ranks = cr.RankConfig(early_steps=1, late_steps=2, target_compression=12.0, truncate_every=1)
    scheduler = cr.RankScheduler(model, optimizer, ranks)
    for _ in range(3):
        scheduler.loss(sum(bag.dense_matrix().square().mean() for bag in model.tt_bags.values())).backward()
        optimizer.step()
        scheduler.step()
    assert cr.compression_report(model).ratio >= 12
    for row_order, init, message in [
        ({"else": order}, "random", "row_order names 'else'"),
        ("similarity", "random", "'similarity' with init='tt_svd'"),
        ({"other": order[1:]}, "random", "give each of the numbers 0 to 3999 once"),
    ]:
        refuse(message, cr.compress_, dense(rows), tables=tables, init=init, row_order=row_order)


def fit(
    weights: list[Tensor], shapes: list[TTShape], budget: int, importance: list | None = None, hot_rows: tuple = ()
) -> list[TTEmbeddingBag]:
    """Fit tables of these shapes to the weights within the budget."""
    tables = [TTEmbeddingBag(*w.shape, shape=s, hot_rows=hot_rows, dtype=w.dtype) for w, s in zip(weights, shapes, strict=True)]
    fit_tables_(tables, weights, budget, importance)
    return [table.requires_grad_(False) for table in tables]


def test_no_other_ranks_are_better_by_more_than_the_last_rank() -> None:
    """The spectra of the matrices fall slowly, fast, and at a tenth of the scale."""
    weights, budget = [], 1400
    for shape, decay, scale in zip(SHAPES, (-0.5, -2.0, -0.5), (1.0, 1.0, 0.1), strict=True):
        sides = [m * n for m, n in zip(shape.row_shape, shape.col_shape, strict=True)]
        bases = [torch.linalg.qr(torch.randn(side, 30, dtype=torch.float64)).Q for side in sides]
        unfolded = scale * (bases[0] * torch.arange(1.0, 31) ** decay) @ bases[1].mT
        modes = unfolded.reshape(shape.row_shape[0], 4, shape.row_shape[1], 4).transpose(1, 2)
        weights.append(modes.reshape(shape.num_rows, shape.num_cols))
    tables = fit(weights, SHAPES, budget)
    actual = [table.shape.ranks[0] for table in tables]
    size = sum(shape.with_ranks([rank]).num_params for shape, rank in zip(SHAPES, actual, strict=True))
    assert 0.9 * budget <= size <= budget
    assert actual[0] > actual[1] >= actual[2] > 0, "a table without ranks could never be trained again"
    error = sum(float((table.dense_matrix() - weight).square().sum()) for table, weight in zip(tables, weights, strict=True))
    ranked = [[(w, s.with_ranks([r])) for r in range(1, 17)] for w, s in zip(weights, SHAPES, strict=True)]
    table = [[float((tt_to_dense(tt_svd(w, s), s) - w).square().sum()) for w, s in of_table] for of_table in ranked]
    best = min(
        sum(errors[r - 1] for errors, r in zip(table, ranks, strict=True))
        for ranks in itertools.product(range(1, 17), repeat=3)
        if sum(s.with_ranks([r]).num_params for s, r in zip(SHAPES, ranks, strict=True)) <= budget
    )
    assert error <= 1.05 * best


def test_hot_rows_and_ranks_share_a_budget() -> None:
    """A sum of a TT table and narrow hot rows is recovered by a table with hot rows, and not without them."""
    shape, frequency = TTShape((20, 20), (4, 4), 3), 1.0 / torch.arange(1, 401, dtype=torch.float64)
    cores = [torch.randn(size, dtype=torch.float64) for size in shape.core_shapes]
    weight = tt_to_dense(cores, shape)
    weight[:60] += 3 * torch.randn(60, 2, dtype=torch.float64) @ torch.randn(2, 16, dtype=torch.float64)
    budget = shape.num_params + 60 * 2 + 2 * 16 + 2
    (with_rows,) = fit([weight], [shape], budget, [frequency], ((60, 2),))
    (without_rows,) = fit([weight], [shape], budget, [frequency])
    (block,) = with_rows.hot_blocks()
    assert with_rows.shape.num_params + block.shape.num_params <= budget
    assert min(with_rows.shape.ranks, block.shape.ranks) > (0,)
    errors = [(frequency[:, None] * (each.dense_matrix() - weight).square()).sum() for each in (with_rows, without_rows)]
    assert errors[0] < 0.2 * errors[1]
