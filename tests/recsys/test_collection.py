"""Collections of bags and of sequences agree with TorchRec's over dense tables: keys, order, values, gradients."""

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
from jagged import random_jagged
from refusals import refuse
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.fx import symbolic_trace
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.sparse.jagged_tensor import JaggedTensor

import comera_rec as cr
from comera_rec import TableCompression, TTEmbeddingBagCollection, TTEmbeddingBagConfig, compress_, export_dense
from comera_rec.rank import truncate_ranks_
from comera_rec.recsys.keyed import are_within


def table(name: str, features: list[str], *, rows: int = 101, dim: int = 16, **arguments: Any) -> TTEmbeddingBagConfig:
    return TTEmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features, **arguments)


def limits(tables: list[EmbeddingBagConfig]) -> dict[str, int]:
    """Rows of each feature's smallest table, which bound its ids."""
    least: dict[str, int] = {}
    for config in tables:
        for feature in config.feature_names:
            least[feature] = min(config.num_embeddings, least.get(feature, config.num_embeddings))
    return least


def gradients_of_rows(collection: TTEmbeddingBagCollection, dense: Any) -> None:
    """Check that every core's gradient is that of the dense table of its name, propagated through the contraction."""
    for name, bag in collection.embedding_bags.items():
        upstream = dense[name].weight.grad
        if name not in collection.tt_bags:
            torch.testing.assert_close(bag.weight.grad, upstream)
            continue
        parameters = list(bag.parameters())
        expected = torch.autograd.grad(bag.dense_matrix(), parameters, upstream)
        torch.testing.assert_close([parameter.grad for parameter in parameters], list(expected))


def assert_same_as_dense(tables: list[EmbeddingBagConfig], features: KeyedJaggedTensor, is_weighted: bool = False) -> Tensor:
    collection = TTEmbeddingBagCollection(tables, is_weighted=is_weighted)
    dense = export_dense(collection)
    assert type(dense) is EmbeddingBagCollection
    reference = EmbeddingBagCollection([each.dense() if isinstance(each, TTEmbeddingBagConfig) else each for each in tables])
    assert dense.state_dict().keys() == reference.state_dict().keys()
    actual, expected = collection(features), dense(features)
    assert actual.keys() == expected.keys()
    assert actual.length_per_key() == expected.length_per_key()
    torch.testing.assert_close(actual.values(), expected.values())
    assert {key: value.shape for key, value in actual.to_dict().items()} == {k: v.shape for k, v in expected.to_dict().items()}
    upstream = torch.randn_like(expected.values())
    actual.values().backward(upstream)
    expected.values().backward(upstream)
    gradients_of_rows(collection, dense.embedding_bags)
    return actual.values()


@pytest.mark.parametrize(("data_type", "dtype"), [(DataType.FP16, torch.float16), (DataType.BF16, torch.bfloat16)])
def test_16_bit_tables_pool_to_float32_and_weights_keep_their_precision(data_type: DataType, dtype: torch.dtype) -> None:
    collection = TTEmbeddingBagCollection([table("a", ["f"], tt_ranks=4, data_type=data_type)], is_weighted=True)
    assert collection.tt_bag("a").core_0.dtype == dtype
    weights = torch.tensor([1.0 + 2**-10, -1.0])  # in bfloat16 they would cancel out
    features = KeyedJaggedTensor(keys=["f"], values=torch.tensor([5, 5]), lengths=torch.tensor([2]), weights=weights)
    row = collection.tt_bag("a").dense_matrix().detach().float()[5]
    torch.testing.assert_close(collection(features).values()[0].detach(), row * 2**-10, rtol=0.02, atol=1e-6)


def test_tables_of_any_ranks_share_a_lookup_on_cpu_and_of_similar_ranks_elsewhere() -> None:
    tables = [table(name, [name], tt_ranks=rank) for name, rank in [("a", 8), ("b", 9), ("c", 1), ("d", 16), ("e", 17)]]
    for device, groups in (("cpu", [["a", "b", "c", "d", "e"]]), ("meta", [["a", "b", "c", "d"], ["e"]])):
        assert [list(lookup.tables) for lookup in TTEmbeddingBagCollection(tables, device=device)._lookups()] == groups


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


@settings(max_examples=80)
@given(
    tables=configurations(), batch=st.integers(1, 6), longest=st.sampled_from([0, 1, 5]), seed=st.integers(0, 99),
    weights=st.sampled_from(["none", "ignored", "used"]),
)  # fmt: skip
def test_any_configuration(tables: list[TTEmbeddingBagConfig], batch: int, longest: int, seed: int, weights: str) -> None:
    torch.manual_seed(seed)
    for config in tables:  # as the collection does
        config.feature_names = config.feature_names or [config.name]
        if weights == "used":
            config.pooling = PoolingType.SUM
    features = random_jagged(limits(list(tables)), batch, longest=longest, seed=seed, weighted=weights != "none")
    assert_same_as_dense(list(tables), features, is_weighted=weights == "used")


@pytest.mark.parametrize("ranks", [4, None], ids=["tt", "dense"])
@pytest.mark.parametrize("bad", [101, -1])
def test_ids_out_of_range_name_table_id_and_limit(bad: int, ranks: int | None) -> None:
    collection = TTEmbeddingBagCollection([table("users", ["f"], tt_ranks=ranks), table("clicks", ["g"])])
    features = KeyedJaggedTensor(keys=["f", "g"], values=torch.tensor([5, bad, 0]), lengths=torch.tensor([2, 1]))
    refuse(rf"id {bad} is out of range for table 'users'.*: its ids run from 0 to 100", collection, features)


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
    configs = [table("users", ["f"], tt_ranks=4), table("clicks", ["g"], rows=90), table("pages", ["h", "f"], tt_ranks=2)]
    collection = TTEmbeddingBagCollection(configs, is_weighted=True)
    strides = {"stride_per_key_per_rank": [[2], [1], [3]], "inverse_indices": (list("fgh"), torch.tensor([[1, 0], [0, 0], [2, 1]]))}
    values = torch.tensor([3, -1, 90, 100, 7, 101, 100]), torch.tensor([3, 0, 90, 0, 7, 0, 100])
    bad, good = (
        KeyedJaggedTensor(
            keys=list("fgh"), values=ids, weights=torch.arange(1.0, 8), lengths=torch.tensor([2, 1, 1, 1, 0, 2]),
            **(strides if varies else {}),  # type: ignore[arg-type]
        )
        for ids in values
    )  # fmt: skip
    refuse("is out of range for table", collection, bad)
    expected = collection(good).values()
    collection.bounds_check.mode = mode  # type: ignore[assignment]
    says = pytest.warns(UserWarning, match="^id -1 is out of range for its table: such ids count as 0")
    with says if collection.bounds_check.mode == "warning" else nullcontext(), torch.inference_mode():
        torch.testing.assert_close(collection(bad).values(), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collection(bad).values().sum().backward()
    assert collection.bounds_check.num_bad_ids == 6
    refuse("the mode of bounds checks is 'stop': choose 'fatal', 'warning' or", setattr, collection.bounds_check, "mode", "stop")
    tables = [EmbeddingConfig(name=f"t{rows}", num_embeddings=rows, embedding_dim=4, feature_names=["f"]) for rows in (5, 9)]
    refuse("tables of 'f' differ in rows, so no", setattr, cr.TTEmbeddingCollection(tables).bounds_check, "mode", mode)


def test_reset_redraws_every_table_also_from_the_meta_device() -> None:
    tables = [table("a", ["f"], tt_ranks=4), table("b", ["g"])]
    collection = TTEmbeddingBagCollection(tables, device="meta")
    assert collection.device.type == "meta"
    assert all(parameter.is_meta for parameter in collection.parameters())
    for module in collection.to_empty(device="cpu").modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    of_tt = [f"tt_bags.a.{name}" for name in ("core_0", "core_1", "rank_1")]
    assert sorted(collection.state_dict()) == ["dense_bags.embedding_bags.b.weight", *of_tt]
    assert collection(random_jagged({"f": 101, "g": 101}, 4)).values().isfinite().all()
    collection = TTEmbeddingBagCollection(tables)
    before = {name: value.clone() for name, value in collection.state_dict().items()}
    collection.reset_parameters()
    assert [n for n, v in collection.state_dict().items() if torch.equal(v, before[n])] == ["tt_bags.a.rank_1"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: [table("a", ["f"], tt_ranks=4), table("a", ["g"])], "two tables are named 'a'"),
        (lambda: [table("a", ["f", "f"], tt_ranks=4)], "table 'a' has a feature twice"),
        (lambda: [table("items", ["f"], tt_ranks=4)], "table name 'items' can't name a submodule of an nn.ModuleDict: choose"),
        (lambda: [table("user.id", ["f"])], "table name 'user.id' can't name a submodule"),
        (lambda: [table("a", ["f"], tt_ranks=4, pooling=PoolingType.NONE)], "table 'a' has pooling .*: choose SUM or MEAN"),
        (lambda: [table("a", ["f"], tt_ranks=4, data_type=DataType.INT8)], "table 'a' has data type .*: a TT table takes FP32"),
        (lambda: [table("a", ["f"], rows=0)], "table 'a': num_embeddings is 0: give a positive integer"),
    ],
)
def test_invalid_collections_are_refused(make: Callable[[], list[EmbeddingBagConfig]], message: str) -> None:
    refuse(message, lambda: TTEmbeddingBagCollection(make()))


@pytest.mark.parametrize("pooled", [True, False])
def test_state_dicts_of_torchrecs_collections_load_dense_tables_and_name_tt_ones(pooled: bool) -> None:
    config: Any = EmbeddingBagConfig if pooled else EmbeddingConfig
    kind = "embedding_bags" if pooled else "embeddings"
    tables = [config(name=name, num_embeddings=20, embedding_dim=8, feature_names=[name]) for name in ("small", "large")]
    stock = torch.nn.Sequential((EmbeddingBagCollection if pooled else EmbeddingCollection)(tables=tables))
    model = copy.deepcopy(stock)
    compress_(model, tables=TableCompression(tt_ranks=2, min_rows=1, dense_tables=("small",)))
    with pytest.raises(RuntimeError, match=rf"0\.{kind}\.large\.weight is dense, but the table is a TT table: load it into"):
        model.load_state_dict(stock.state_dict())
    stored = {name: value + 1 for name, value in stock.state_dict().items() if "small" in name}
    assert not model.load_state_dict(stored, strict=False).unexpected_keys
    [weight] = [value for name, value in model.state_dict().items() if name.endswith("small.weight")]
    torch.testing.assert_close(weight, stored[f"0.{kind}.small.weight"])


ROWS = {"seen": 900, "bought": 900, "site": 30}


def sequences(**large: object) -> list[EmbeddingConfig]:
    """Configs with two features of one table, and one feature of two tables."""
    return [
        cr.TTEmbeddingConfig(
            name="products", num_embeddings=900, embedding_dim=8, feature_names=["seen", "bought"], **(large or {"tt_ranks": 4})
        ),
        EmbeddingConfig(name="sites", num_embeddings=30, embedding_dim=8, feature_names=["site"]),
        EmbeddingConfig(name="seen twice", num_embeddings=900, embedding_dim=8, feature_names=["seen"]),
    ]


def assert_same_rows(actual: dict[str, JaggedTensor], expected: dict[str, JaggedTensor]) -> None:
    assert list(actual) == list(expected)
    for key, rows in expected.items():
        torch.testing.assert_close(actual[key].values(), rows.values())
        assert torch.equal(actual[key].lengths(), rows.lengths())
        torch.testing.assert_close(actual[key].weights_or_none(), rows.weights_or_none())  # ids, on request


@pytest.mark.parametrize("large", [{"tt_ranks": 4}, {"tt_ranks": 3, "hot_rows": ((20, 4), (100, 1))}], ids=str)
@pytest.mark.parametrize(("samples", "longest"), [(1, 4), (7, 4), (2, 0)])
def test_rows_and_gradients_are_those_of_the_dense_tables(samples: int, longest: int, large: dict[str, object]) -> None:
    collection = cr.TTEmbeddingCollection(sequences(**large), need_indices=longest > 0)
    for block in collection.tables.tt_bag("products").hot_blocks():
        nn.init.normal_(block.core_0)
    dense = export_dense(collection)
    assert type(dense) is EmbeddingCollection
    features = random_jagged(ROWS, samples, longest=longest)
    actual, expected = collection(features), dense(features)
    assert list(actual) == ["seen@products", "bought", "site", "seen@seen twice"]
    assert_same_rows(actual, expected)
    assert (actual["bought"].weights_or_none() is not None) == (longest > 0)
    assert list(collection.embeddings) == list(dense.embeddings)
    for rows in (actual, expected):
        sum((k + 1) * each.values().square().sum() for k, each in enumerate(rows.values())).backward()
    gradients_of_rows(collection.tables, dense.embeddings)


def test_no_feature_is_padded_to_the_longest() -> None:
    collection = cr.TTEmbeddingCollection(sequences())
    ids = {"seen": torch.randint(900, (500,)), "bought": torch.tensor([3]), "site": torch.tensor([7])}
    for lengths, variable in (
        (torch.tensor([250, 250, 1, 0, 0, 1]), {}),
        (torch.tensor([5] * 100 + [1, 1]), {"stride_per_key_per_rank": [[100], [1], [1]]}),
    ):
        features = KeyedJaggedTensor(keys=list(ids), values=torch.cat(list(ids.values())), lengths=lengths, **variable)
        assert collection.tables(features).values().shape == (2 * 500 + 1 + 1, 8)
        assert_same_rows(collection(features), export_dense(collection)(features))


def test_invalid_sequences_are_refused() -> None:
    refuse("tables is empty: give at least one table config", cr.TTEmbeddingCollection, [])
    narrow = EmbeddingConfig(name="b", num_embeddings=9, embedding_dim=4)
    refuse(r"tables have dimensions \[4, 8\]", cr.TTEmbeddingCollection, [sequences()[0], narrow])


@pytest.mark.parametrize("init", ["random", "tt_svd"])
def test_swapped_into_a_model(init: str) -> None:
    products, sites, _ = sequences()
    plain = EmbeddingCollection([products.dense(), sites], use_gather_select=True)  # type: ignore[attr-defined]
    model = nn.ModuleDict({"sequences": plain})
    small, large = plain.embeddings["sites"].weight, plain.embeddings["products"].weight.detach()
    compress_(model, tables=TableCompression(tt_ranks=40, min_rows=100), init=init)
    swapped = model["sequences"]
    assert swapped.use_gather_select()
    assert swapped.tables.dense_bags.use_gather_select()
    assert not cr.TTEmbeddingCollection(sequences()).use_gather_select()
    assert swapped.tables.embedding_bags["sites"].weight is small
    bag = swapped.tables.tt_bag("products")
    error = float((bag.dense_matrix().detach() - large).norm() / large.norm())
    assert error < 0.9 if init == "tt_svd" else error > 1.2
    features = random_jagged(ROWS, 4)
    assert_same_rows(swapped(features), export_dense(model)["sequences"](features))


def test_traced_and_truncated() -> None:
    model = nn.Sequential(cr.TTEmbeddingCollection(sequences()))
    features = random_jagged(ROWS, 6)
    assert_same_rows(symbolic_trace(model)(features), model(features))
    with torch.no_grad():
        model[0].tables.tt_bag("products").rank_1[:2] = 0
    before = model(features)
    assert truncate_ranks_(model, threshold=0.5) == {"0.tables.tt_bags.products": (2,)}
    assert_same_rows(model(features), before)
