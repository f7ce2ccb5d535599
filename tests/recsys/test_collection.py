"""TTEmbeddingBagCollection agrees with torchrec's EmbeddingBagCollection over dense tables: keys, order, values, gradients."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.modules.embedding_configs import DataType

from comera_rec import TableCompression, TTEmbeddingBagCollection, TTEmbeddingBagConfig, TTShape, compress_, export_dense
from comera_rec.rank import truncate_ranks_
from comera_rec.recsys.keyed import are_within

MakeJagged = Callable[..., KeyedJaggedTensor]


def table(name: str, features: list[str], *, rows: int = 101, dim: int = 16, **arguments: object) -> TTEmbeddingBagConfig:
    return TTEmbeddingBagConfig(
        name=name,
        num_embeddings=rows,
        embedding_dim=dim,
        feature_names=features,
        **arguments,  # type: ignore[arg-type]
    )


def limits(tables: list[EmbeddingBagConfig]) -> dict[str, int]:
    """Rows of each feature's smallest table, which bound its ids."""
    least: dict[str, int] = {}
    for config in tables:
        for feature in config.feature_names:
            least[feature] = min(config.num_embeddings, least.get(feature, config.num_embeddings))
    return least


def gradients_of_rows(collection: TTEmbeddingBagCollection, dense: EmbeddingBagCollection) -> None:
    """Check that every core's gradient is the dense table's, propagated through the contraction."""
    for name in collection.tt_bags:
        bag = collection.tt_bag(name)
        parameters = list(bag.parameters())
        upstream = dense.embedding_bags[name].weight.grad
        expected = torch.autograd.grad(bag.dense_matrix(), parameters, upstream)
        torch.testing.assert_close([parameter.grad for parameter in parameters], list(expected))
    if collection.dense_bags is not None:
        for name, bag in collection.dense_bags.embedding_bags.items():  # type: ignore[union-attr, operator]
            torch.testing.assert_close(bag.weight.grad, dense.embedding_bags[name].weight.grad)


def assert_same_as_dense(tables: list[EmbeddingBagConfig], features: KeyedJaggedTensor, is_weighted: bool = False) -> Tensor:
    collection = TTEmbeddingBagCollection(tables, is_weighted=is_weighted)
    dense = export_dense(collection)
    assert type(dense) is EmbeddingBagCollection
    reference = EmbeddingBagCollection(
        [config.dense() if isinstance(config, TTEmbeddingBagConfig) else config for config in tables]
    )
    assert dense.state_dict().keys() == reference.state_dict().keys()
    actual, expected = collection(features), dense(features)
    assert actual.keys() == expected.keys()
    assert actual.length_per_key() == expected.length_per_key()
    torch.testing.assert_close(actual.values(), expected.values())
    assert {key: value.shape for key, value in actual.to_dict().items()} == {k: v.shape for k, v in expected.to_dict().items()}
    upstream = torch.randn_like(expected.values())
    actual.values().backward(upstream)
    expected.values().backward(upstream)
    gradients_of_rows(collection, dense)
    return actual.values()


def test_weights(random_jagged: MakeJagged) -> None:
    tables = [table("a", ["f", "g"], tt_ranks=4), table("b", ["h"]), table("c", ["f"], dim=8, tt_ranks=2)]
    assert_same_as_dense(tables, random_jagged(limits(tables), 9, weighted=True), is_weighted=True)
    plain = random_jagged(limits(tables), 9, weighted=False)
    with pytest.raises(Exception, match=r"[Ww]eights"):
        TTEmbeddingBagCollection(tables, is_weighted=True)(plain)
    assert_same_as_dense(tables, random_jagged(limits(tables), 9, weighted=True), is_weighted=False)


def test_weights_keep_their_precision_beside_16_bit_tables() -> None:
    collection = TTEmbeddingBagCollection([table("a", ["f"], tt_ranks=4, data_type=DataType.BF16)], is_weighted=True)
    weights = torch.tensor([1.0 + 2**-10, -1.0])  # in bfloat16 they would cancel out
    features = KeyedJaggedTensor(keys=["f"], values=torch.tensor([5, 5]), lengths=torch.tensor([2]), weights=weights)
    row = collection.tt_bag("a").dense_matrix().detach().float()[5]
    torch.testing.assert_close(collection(features).values()[0].detach(), row * 2**-10, rtol=0.02, atol=1e-6)


def grouped(collection: TTEmbeddingBagCollection) -> list[list[str]]:
    """Names of the tables that share a lookup."""
    return [list(lookup.tables) for lookup in collection._lookups()]


def test_tables_still_share_a_lookup_after_their_ranks_change(random_jagged: MakeJagged) -> None:
    tables = [table(name, [name], rows=rows, tt_ranks=4) for name, rows in (("a", 101), ("b", 211), ("c", 57))]
    collection, features = TTEmbeddingBagCollection(tables), random_jagged(limits(tables), 9)
    with torch.no_grad():
        collection.tt_bag("b").rank_1[1:3] = 0.0
        collection.tt_bag("c").rank_1.zero_()
    before = collection(features).values()
    truncate_ranks_(collection, threshold=0.1)
    assert [collection.tt_bag(name).shape.ranks for name in "abc"] == [(4,), (2,), (0,)]
    torch.testing.assert_close(collection(features).values(), before)
    assert grouped(collection) == [["a", "b", "c"]]


def test_tables_of_any_ranks_share_a_lookup_on_cpu_and_of_equal_ranks_elsewhere() -> None:
    tables = [table(name, [name], tt_ranks=rank) for name, rank in [("a", 8), ("b", 9), ("c", 1), ("d", 16), ("e", 17)]]
    assert grouped(TTEmbeddingBagCollection(tables)) == [["a", "b", "c", "d", "e"]]
    assert grouped(TTEmbeddingBagCollection(tables, device="meta")) == [["a", "c"], ["b", "d"], ["e"]]


def test_variable_batch_with_inverse_indices() -> None:
    tables = [table("a", ["f", "g"], tt_ranks=4), table("b", ["h"], dim=8), table("c", ["f"], dim=24, tt_ranks=2)]
    # Feature f has 2 distinct bags for 5 samples, g has 4, h has 3.
    features = KeyedJaggedTensor(
        keys=["f", "g", "h"],
        values=torch.tensor([3, 100, 3, 0, 7, 7, 99, 5, 1, 0]),
        lengths=torch.tensor([2, 1, 1, 0, 2, 1, 1, 0, 2]),
        stride_per_key_per_rank=[[2], [4], [3]],
        inverse_indices=(["f", "g", "h"], torch.tensor([[0, 1, 0, 1, 1], [3, 2, 1, 0, 0], [2, 2, 0, 1, 0]])),
    )
    values = assert_same_as_dense(tables, features)
    assert values.shape == (5, 16 + 16 + 8 + 24)
    torch.testing.assert_close(values[0, :16], values[2, :16])  # both are bag 0 of feature f
    assert_same_as_dense([table("dense", ["f", "h"])], features)


@st.composite
def configurations(draw: st.DrawFn) -> list[TTEmbeddingBagConfig]:
    """Draw tables that share lookups and features, or have none of their own; their ranks may differ."""
    names = "abcdef"[: draw(st.integers(1, 6))]
    dims = draw(st.sampled_from([[16], [16, 8], [1, 7, 64, 128]]))
    ranks = draw(st.sampled_from([[4, 1, 9], [(2, 3), (8, 2)], [None, 3, (2, 3), (2, 3, 2)]]))
    return [
        table(
            name,
            draw(st.lists(st.sampled_from(["f", "g", "h", "i"]), max_size=2, unique=True)),
            rows=draw(st.sampled_from([1, 2, 13, 100, 1009])),
            dim=draw(st.sampled_from(dims)),
            pooling=draw(st.sampled_from([PoolingType.SUM, PoolingType.MEAN])),
            tt_ranks=draw(st.sampled_from(ranks)),
        )
        for name in names
    ]


@settings(max_examples=60)
@given(tables=configurations(), batch=st.integers(1, 6), longest=st.sampled_from([0, 1, 5]), seed=st.integers(0, 99))
def test_any_configuration(
    tables: list[TTEmbeddingBagConfig], batch: int, longest: int, seed: int, random_jagged: MakeJagged
) -> None:
    torch.manual_seed(seed)
    for config in tables:  # as the collection does
        config.feature_names = config.feature_names or [config.name]
    assert_same_as_dense(list(tables), random_jagged(limits(list(tables)), batch, longest=longest, seed=seed))


@pytest.mark.parametrize("ranks", [4, None], ids=["tt", "dense"])
@pytest.mark.parametrize("bad", [101, -1])
def test_ids_out_of_range_name_table_id_and_limit(bad: int, ranks: int | None) -> None:
    collection = TTEmbeddingBagCollection([table("users", ["f"], tt_ranks=ranks), table("clicks", ["g"])])
    features = KeyedJaggedTensor(keys=["f", "g"], values=torch.tensor([5, bad, 0]), lengths=torch.tensor([2, 1]))
    with pytest.raises(ValueError, match=rf"id {bad} is out of range for table 'users'.*: its ids run from 0 to 100"):
        collection(features)


@pytest.mark.parametrize("bad", [None, ("a", -1), ("a", 5), ("c", -1), ("c", 7)], ids=str)
def test_ids_of_all_features_are_checked_by_one_comparison(bad: tuple[str, int] | None) -> None:
    ids = {"a": [4, 0], "b": [10**12], "c": [6, 2, 6]}
    if bad is not None:
        ids[bad[0]][-1] = bad[1]
    values = torch.tensor([*ids["a"], *ids["b"], *ids["c"], -9])  # the last one is in no bag
    features = KeyedJaggedTensor(keys=list("abc"), values=values, lengths=torch.tensor([0, 2, 1, 0, 3, 0], dtype=torch.int32))
    wrong = [] if bad is None else [{"a": 1, "c": 5}[bad[0]]]
    assert are_within(features, {"a": 5, "c": 7}).logical_not().nonzero().flatten().tolist() == wrong
    with pytest.raises(ValueError, match=r"ids are torch.float32: give int32 or int64"):
        are_within(KeyedJaggedTensor(keys=["a"], values=torch.zeros(1), lengths=torch.ones(1).int()), {})


@pytest.mark.parametrize("mode", ["warning", "ignore", BoundsCheckMode.V2_WARNING, BoundsCheckMode.NONE], ids=repr)
@pytest.mark.parametrize("varies", [False, True])
def test_bad_ids_count_as_row_0_unless_they_are_fatal(mode: str | BoundsCheckMode, varies: bool) -> None:
    configs = [table("users", ["f"], tt_ranks=4), table("clicks", ["g", "f"], rows=90), table("pages", ["h"], tt_ranks=2)]
    collection = TTEmbeddingBagCollection(configs, is_weighted=True)
    strides = {"stride_per_key_per_rank": [[2], [1], [3]], "inverse_indices": (list("fgh"), torch.tensor([[1, 0], [0, 0], [2, 1]]))}
    values = torch.tensor([3, -1, 90, 100, 7, 101, 100]), torch.tensor([3, 0, 0, 0, 7, 0, 100])
    bad, good = (
        KeyedJaggedTensor(
            keys=list("fgh"), values=ids, weights=torch.arange(1.0, 8), lengths=torch.tensor([2, 1, 1, 1, 0, 2]),
            **(strides if varies else {}),  # type: ignore[arg-type]
        )
        for ids in values
    )  # fmt: skip
    with pytest.raises(ValueError, match="is out of range for table"):
        collection(bad)
    expected = collection(good).values()
    collection.bounds_check.mode = mode  # type: ignore[assignment]
    says = pytest.warns(UserWarning, match="^id -1 is out of range for its table: such ids count as 0")
    with says if collection.bounds_check.mode == "warning" else nullcontext():
        torch.testing.assert_close(collection(bad).values(), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collection(bad)
    assert collection.bounds_check.num_bad_ids == 8
    with pytest.raises(ValueError, match="the mode of bounds checks is 'stop': choose 'fatal', 'warning' or 'ignore'"):
        collection.bounds_check.mode = "stop"


@pytest.mark.parametrize("data_type", [DataType.FP16, DataType.BF16])
def test_half_precision_tables_pool_to_float32(data_type: DataType, random_jagged: MakeJagged) -> None:
    config = table("a", ["f"], tt_ranks=4, data_type=data_type)
    collection = TTEmbeddingBagCollection([config])
    features = random_jagged({"f": 101}, 5)
    actual = collection(features).values()
    assert actual.dtype == torch.float32
    assert collection.tt_bag("a").core_0.dtype in (torch.float16, torch.bfloat16)
    expected = export_dense(collection)(features).values()
    torch.testing.assert_close(actual, expected, rtol=0, atol=16 * 2**-8 * float(expected.detach().abs().max()))


def test_reset_redraws_every_table_also_from_the_meta_device(random_jagged: MakeJagged) -> None:
    tables = [table("a", ["f"], tt_ranks=4), table("b", ["g"])]
    collection = TTEmbeddingBagCollection(tables, device="meta")
    assert collection.device.type == "meta"
    assert all(parameter.is_meta for parameter in collection.parameters())
    for module in collection.to_empty(device="cpu").modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert sorted(collection.state_dict()) == [
        "dense_bags.embedding_bags.b.weight",
        "tt_bags.a.core_0",
        "tt_bags.a.core_1",
        "tt_bags.a.rank_1",
    ]
    assert collection(random_jagged({"f": 101, "g": 101}, 4)).values().isfinite().all()
    collection = TTEmbeddingBagCollection(tables)
    before = {name: value.clone() for name, value in collection.state_dict().items()}
    collection.reset_parameters()
    same = [name for name, value in collection.state_dict().items() if torch.equal(value, before[name])]
    assert same == ["tt_bags.a.rank_1"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: [table("a", ["f"], tt_ranks=4), table("a", ["g"])], "two tables are named 'a'"),
        (lambda: [table("items", ["f"], tt_ranks=4)], "table name 'items' can't name a submodule of an nn.ModuleDict: choose"),
        (lambda: [table("user.id", ["f"])], "table name 'user.id' can't name a submodule"),
        (lambda: [table("a", ["f"], tt_ranks=4, pooling=PoolingType.NONE)], "table 'a' has pooling .*: choose SUM or MEAN"),
        (lambda: [table("a", ["f"], tt_ranks=4, data_type=DataType.INT8)], "table 'a' has data type .*: a TT table takes FP32"),
        (lambda: [table("a", ["f"], rows=0)], "table 'a': num_embeddings is 0: give a positive integer"),
        (lambda: [table("a", ["f"], shape=TTShape((10, 10), (4, 4), 2))], "table 'a': shape spans 100 x 16, less than 101 x 16"),
    ],
)
def test_invalid_collections_are_refused(make: Callable[[], list[EmbeddingBagConfig]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TTEmbeddingBagCollection(make())


@pytest.mark.parametrize("pooled", [True, False])
def test_state_dicts_of_torchrecs_collections_load_dense_tables_and_name_tt_ones(pooled: bool) -> None:
    config: Any = EmbeddingBagConfig if pooled else EmbeddingConfig
    kind = "embedding_bags" if pooled else "embeddings"
    tables = [config(name=name, num_embeddings=20, embedding_dim=8, feature_names=[name]) for name in ("small", "large")]
    stock = torch.nn.Sequential((EmbeddingBagCollection if pooled else EmbeddingCollection)(tables=tables))
    model = copy.deepcopy(stock)
    compress_(model, tables=TableCompression(tt_ranks=2, min_rows=1, dense_tables=("small",)))
    with pytest.raises(
        RuntimeError, match=rf"0\.{kind}\.large\.weight is dense, but the table is a TT table: load it into the dense"
    ):
        model.load_state_dict(stock.state_dict())
    stored = {name: value + 1 for name, value in stock.state_dict().items() if "small" in name}
    assert not model.load_state_dict(stored, strict=False).unexpected_keys
    [weight] = [value for name, value in model.state_dict().items() if name.endswith("small.weight")]
    torch.testing.assert_close(weight, stored[f"0.{kind}.small.weight"])
