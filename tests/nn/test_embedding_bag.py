"""TTEmbeddingBag and TTEmbedding agree with torch's layers over the dense matrix: outputs and the gradients of every parameter."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from torchrec import KeyedJaggedTensor

from comera_rec import TTEmbedding, TTEmbeddingBag, TTEmbeddingCollection, TTEmbeddingConfig, TTLinear, TTShape
from comera_rec.nn import TiedProjection
from comera_rec.tt import is_slice_major

# Table sizes, modes and ranks: orders 1 to 4, primes whose last rows and columns are padding, rank 1, sizes that fit exactly.
SHAPES = [
    (35, 6, TTShape((7, 5), (3, 2), (4,))),
    (31, 7, TTShape((7, 5), (4, 2), (1,))),
    (101, 11, TTShape((7, 5, 3), (3, 2, 2), (4, 5))),
    (97, 16, TTShape((4, 3, 3, 3), (2, 2, 2, 2), (2, 3, 2))),
    (35, 6, TTShape((35,), (6,), ())),
]
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)  # compiled, and in plain torch
SAVED, LOADING = TTShape((7, 5, 3), (3, 2, 2), (2, 5)), TTShape((7, 5, 3), (3, 2, 2), (4, 3))


def build(size: tuple, dtype: torch.dtype = torch.float64, *, kind: type = TTEmbeddingBag, **arguments: object) -> Any:
    """Build a table whose rank parameters differ from 1 and hot rows from 0, so that their gradients are tested as well."""
    bag = kind(size[0], size[1], shape=size[2], dtype=dtype, **arguments)
    for rank in bag.rank_parameters():
        nn.init.uniform_(rank, 0.5, 1.5)
    for block in bag.hot_blocks():
        nn.init.normal_(block.core_0)
    return bag


def jagged(num_embeddings: int) -> tuple[Tensor, Tensor]:
    """Bags of 3, 0, 1, 4, 0 ids, with the first and the last row, and repeats within and between bags."""
    last = num_embeddings - 1
    return torch.tensor([0, last, 0, last, 7, 7, 7, 3]), torch.tensor([0, 3, 3, 4, 8])


def assert_same(actual: Tensor, expected: Tensor, parameters: list[Tensor]) -> None:
    torch.testing.assert_close(actual, expected)
    weights = torch.randn_like(expected)
    actual_grads = torch.autograd.grad((actual * weights).sum(), parameters)
    expected_grads = torch.autograd.grad((expected * weights).sum(), parameters)
    torch.testing.assert_close(actual_grads, expected_grads)


@every_dtype
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("size", SHAPES, ids=lambda size: f"order{size[2].order}")
@pytest.mark.parametrize("last", [False, True])
def test_bags_are_those_of_the_dense_matrix(last: bool, size: tuple[int, int, TTShape], mode: str, dtype: torch.dtype) -> None:
    """Jagged bags, bags of one length, weights of both, and no ids."""
    bag = build(size, dtype, mode=mode, include_last_offset=last)
    ids, starts = jagged(size[0])
    offsets = torch.cat([starts, torch.tensor([len(ids)])]) if last else starts
    weights = torch.randn(len(ids), dtype=dtype, requires_grad=True)
    batches = [(ids, offsets), (ids.int(), offsets.int()), (ids.view(4, 2), None), (ids[:0], torch.zeros_like(offsets))]
    weighted = [(ids, offsets, weights), (ids.view(4, 2), None, weights.view(4, 2))] if mode == "sum" else []
    for rows, bounds, *others in [*batches, *weighted]:
        expected = F.embedding_bag(
            rows.long(), bag.dense_matrix(), None if bounds is None else bounds.long(), mode=mode,
            per_sample_weights=others[0] if others else None, include_last_offset=last and bounds is not None,
        )  # fmt: skip
        assert_same(bag(rows, bounds, *others), expected, [*bag.parameters(), *([weights] if others else [])])
        torch.testing.assert_close(bag.to_dense()(rows, bounds, *others), expected)
    assert bag(torch.zeros(0, 4, dtype=torch.int64)).shape == (0, size[1])


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("order", [2, 3])
def test_autocast_leaves_a_lookup_alone_as_in_torch(order: int, impl: str) -> None:
    shape = TTShape.for_table(101, 11, tt_ranks=4, order=order)
    bag = build((101, 11, shape), torch.float32, hot_rows=((50, 2),), impl=impl)
    ids, offsets = jagged(101)
    weights = torch.rand(len(ids))
    expected = bag(ids, offsets, weights)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = bag(ids, offsets, weights)
    assert_same(actual, expected, list(bag.parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("size", "mode"), [(SHAPES[3], "sum"), (SHAPES[2], "max")])
def test_torch_compile_traces_batches_of_any_size_in_one_graph(size: Any, mode: str, dtype: torch.dtype) -> None:
    bag = build(size, dtype, mode=mode, row_order=torch.randperm(size[0]))
    ids, offsets = jagged(size[0])
    torch._dynamo.reset()  # otherwise graphs of other modules count as recompilations
    compiled = torch.compile(bag, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in ((ids, offsets), (ids.repeat(4), offsets), (ids[:5], offsets[:3])):
            assert_same(compiled(*batch), bag(*batch), list(bag.parameters()))
        for bad in (ids - size[0], offsets), (ids, offsets.flip(0)):
            with pytest.raises((RuntimeError, ValueError), match=r"out of range|offsets must ascend"):
                compiled(*bad)
    torch._dynamo.reset()


class Rows(nn.Module):
    """Rows of two features from plain tensors, as exported programs take them."""

    def __init__(self) -> None:
        super().__init__()
        settings: dict[str, Any] = {"num_embeddings": 500, "embedding_dim": 8, "tt_ranks": 4}
        self.tables = TTEmbeddingCollection([TTEmbeddingConfig(name=name, feature_names=[name], **settings) for name in "ab"])

    def forward(self, values: Tensor, lengths: Tensor) -> list[Tensor]:
        return [rows.values() for rows in self.tables(KeyedJaggedTensor(["a", "b"], values, lengths=lengths)).values()]


def sequences_of(*lengths: int) -> tuple[Tensor, ...]:
    return torch.arange(sum(lengths)), torch.tensor(lengths)


def bags_of(ids: int, *starts: int) -> tuple[Tensor, ...]:
    return torch.arange(ids), torch.tensor(starts), torch.rand(ids)


# Modules, and batches, the first of which is the sample.
EXPORTED: dict[str, tuple[Callable[[], nn.Module], list[tuple[Tensor, ...]]]] = {
    "bags": (lambda: build(SHAPES[0], torch.float32), [bags_of(9, 0, 2, 5), bags_of(14, 0, 3, 3, 8, 10), bags_of(4, 0, 1)]),
    "bags to the last offset": (
        lambda: build(SHAPES[0], torch.float32, include_last_offset=True),
        [bags_of(9, 0, 2, 5, 9), bags_of(14, 0, 3, 3, 8, 10, 14), bags_of(4, 0, 1, 4)],
    ),
    "rows": (lambda: TTEmbedding(300, 32, tt_ranks=8), [(torch.randint(300, (count, 6)),) for count in (4, 2, 90)]),
    "scores": (
        lambda: TiedProjection(TTEmbedding(300, 64)),
        [(torch.randn(n, 64) / 8,) for n in (9, 2, 5000)],
    ),  # sums of 64
    "a layer": (lambda: TTLinear(1000, 500, tt_ranks=64), [(torch.randn(count, 1000),) for count in (5, 0, 1, 7, 400)]),
    "sequences": (Rows, [sequences_of(2, 0, 3, 1, 1, 2), sequences_of(0, 0, 1, 4, 1, 3), sequences_of(5, 0, 1, 400, 1, 2, 0, 9)]),
}


@pytest.mark.parametrize(("name", "strict"), [*product(EXPORTED, [False, True])])
def test_exported_modules_take_batches_of_any_size_in_any_layout(name: str, strict: bool) -> None:
    make, batches = EXPORTED[name]
    module, any_size = make().eval(), {0: torch.export.Dim.AUTO}
    exported = torch.export.export(module, batches[0], dynamic_shapes=(any_size,) * len(batches[0]), strict=strict).module()
    for batch in batches:
        strided = [torch.stack([argument, argument], dim=1)[:, 0] for argument in batch]
        for arguments in (batch, strided):
            torch.testing.assert_close(exported(*arguments), module(*batch), rtol=1e-4, atol=1e-5)


@every_dtype
@pytest.mark.parametrize("frozen", ["core_0", "core_1", "rank_1"])
def test_frozen_parameters_and_inference(frozen: str, dtype: torch.dtype) -> None:
    bag = build(SHAPES[0], dtype)
    batch = jagged(35)
    expected = bag(*batch)
    expected.sum().backward()
    gradients = {name: parameter.grad for name, parameter in bag.named_parameters()} | {frozen: None}
    bag.zero_grad()
    bag.get_parameter(frozen).requires_grad_(False)
    bag(*batch).sum().backward()
    torch.testing.assert_close({name: parameter.grad for name, parameter in bag.named_parameters()}, gradients, rtol=0, atol=0)
    with torch.inference_mode():
        assert torch.equal(bag(*batch), expected)


def values(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def assert_unchanged(bag: TTEmbeddingBag, shape: TTShape, before: dict[str, Tensor], parameters: list[nn.Parameter]) -> None:
    assert bag.shape == shape
    assert all(parameter is old for parameter, old in zip(bag.parameters(), parameters, strict=True))
    torch.testing.assert_close(values(bag), before, rtol=0, atol=0)
    assert bag(torch.tensor([[0, 100]])).isfinite().all()


def state_of(num_rows: int, num_cols: int, *modes_and_ranks: tuple[int, ...]) -> dict[str, Tensor]:
    return build((num_rows, num_cols, TTShape(*modes_and_ranks))).state_dict()


def without(state: dict[str, Tensor], gone: str) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name != gone}


MORE = state_of(101, 11, (7, 5, 3, 1), (3, 2, 2, 1), (2, 5, 1))  # the first three of its cores would fit
SPOILED: list[tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = [
    (lambda state: without(state, "rank_1"), "user: a TTEmbeddingBag loads all .* or none, and the state dict lacks rank_1"),
    (lambda state: state_of(101, 11, (7, 3, 5), (3, 2, 2), (2, 5)), "size mismatch"),
    (lambda state: state_of(35, 6, (7, 5), (3, 2), (4,)), "lacks core_2, rank_2"),
    (lambda state: without(MORE, "rank_3"), "has more than 3 cores: load one of a module of the same modes"),
    (lambda state: {name: value.to("meta") for name, value in state.items()}, "is on the meta device, without values: load one"),
    (lambda state: {**state, "rank_2": torch.ones(4)}, "size mismatch"),
    (lambda state: {**state, "core_2": torch.ones(4, 3, 2, 1)}, "size mismatch"),
    (lambda state: {**state, "core_0": torch.ones(21, 2)}, "size mismatch"),
]


@pytest.mark.parametrize("shape", [LOADING, SAVED], ids=["other ranks", "the same ranks"])
@pytest.mark.parametrize(("spoil", "message"), SPOILED, ids=range(len(SPOILED)))
def test_a_state_dict_that_does_not_fit_changes_nothing(spoil: Callable[[Any], Any], message: str, shape: TTShape) -> None:
    bag = build((101, 11, shape))
    before, parameters = values(bag), list(bag.parameters())
    state = spoil(build((101, 11, SAVED)).state_dict())
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=message):
            nn.ModuleDict({"user": bag}).load_state_dict({f"user.{name}": value for name, value in state.items()}, strict=strict)
    assert_unchanged(bag, shape, before, parameters)


def test_a_dense_state_dict_says_how_to_convert_it() -> None:
    """With strict=False, which loads the rest of a model, tables keep their values; a layer's bias alone is never loaded."""
    model = nn.ModuleDict({"user": build((101, 11, LOADING)), "head": TTLinear(11, 64, tt_ranks=2)})
    before = values(model["user"])
    with pytest.raises(RuntimeError, match="Missing key"), pytest.warns(UserWarning, match=r"with comera_rec\.compress_"):
        model.load_state_dict({"user.weight": torch.ones(101, 11)})
    with pytest.warns(UserWarning, match="dense weights for TT modules, which keep their values"):
        model.load_state_dict({"user.weight": torch.ones(101, 11)}, strict=False)
    torch.testing.assert_close(values(model["user"]), before, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match=r"head: a TTLinear loads all .* a dense weight: load it into the dense model"):
        model.load_state_dict({"head.weight": torch.ones(64, 11), "head.bias": torch.ones(64)}, strict=False)


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_of_other_ranks_resizes_in_place_or_is_assigned(assign: bool) -> None:
    saved, bag = build((101, 11, SAVED)), build((101, 11, LOADING))
    before = dict(bag.named_parameters())
    stored = {f"user.{name}": value.contiguous() for name, value in saved.state_dict().items()}  # as in safetensors
    nn.ModuleDict({"user": bag}).load_state_dict(stored, assign=assign)
    assert bag.shape == SAVED
    assert all(is_slice_major(core, k, 3) for k, core in enumerate(bag.cores()))
    assert assign or all(parameter is before[name] for name, parameter in bag.named_parameters())
    ids, offsets = jagged(101)
    assert torch.equal(bag(ids, offsets), saved(ids, offsets))
    parameters = list(bag.parameters())
    with pytest.raises(RuntimeError, match="size mismatch for core_1"):
        bag.load_state_dict({**build((101, 11, LOADING)).state_dict(), "rank_1": torch.ones(3)}, assign=assign)
    assert_unchanged(bag, SAVED, values(saved), parameters)


def test_from_dense_with_a_tolerance_shrinks_the_ranks() -> None:
    dense = build((101, 11, TTShape((7, 5, 3), (3, 2, 2), (2, 3)))).to_dense()
    bag = TTEmbeddingBag.from_dense(dense, shape=TTShape((7, 5, 3), (3, 2, 2), 100), rtol=0.01)
    assert sum(bag.shape.ranks) < sum(TTShape((7, 5, 3), (3, 2, 2), 100).ranks)
    assert float((bag.dense_matrix() - dense.weight).detach().norm()) <= 0.01 * float(dense.weight.detach().norm())
    norms = [float(core.detach().norm()) for core in bag.cores()]
    assert max(norms) == pytest.approx(min(norms)), "the scale is spread evenly over the cores"


@given(data=st.data())
def test_rows_and_scores_are_those_of_the_dense_matrix(data: st.DataObject) -> None:
    """Also with hot rows, an order of rows, a padding row, and ranks that have vanished."""
    draw, order = data.draw, data.draw(st.integers(1, 4))
    modes = st.lists(st.integers(1, 5), min_size=order, max_size=order)
    ranks = st.lists(st.integers(0, 4), min_size=order - 1, max_size=order - 1)
    shape = TTShape(draw(modes), draw(modes), draw(ranks))
    size = draw(st.integers(1, shape.num_rows)), draw(st.integers(1, shape.num_cols)), shape
    leading = draw(st.lists(st.integers(0, 4), max_size=3))
    padding_idx, row_order = draw(st.none() | st.integers(0, size[0] - 1)), draw(st.sampled_from([None, torch.randperm(size[0])]))
    hot_rows = draw(st.sampled_from([(), ((1, 2),), ((size[0] // 2 + 1, 1),)]))
    embedding = build(size, kind=TTEmbedding, padding_idx=padding_idx, row_order=row_order, hot_rows=hot_rows)
    dense, ids = embedding.dense_matrix(), torch.randint(size[0], leading)
    assert_same(embedding(ids), F.embedding(ids, dense), list(embedding.parameters()))
    torch.testing.assert_close(embedding(ids), embedding.to_dense()(ids))
    torch.testing.assert_close(embedding.float()(ids).double(), F.embedding(ids, dense), rtol=1e-4, atol=1e-4)
    x = torch.randn(*leading, size[1], dtype=torch.float64, requires_grad=True)
    dense = embedding.double().dense_matrix()
    assert_same(embedding.logits(x), x @ dense.mT, [x, *embedding.parameters()])


def flops_of_logits(embedding: TTEmbedding, tokens: int) -> int:
    with FlopCounterMode(display=False) as flops, torch.no_grad():
        embedding.logits(torch.zeros(tokens, embedding.embedding_dim))
    return int(flops.get_total_flops())


def test_scores_take_few_operations_and_a_small_table_is_formed_for_many_tokens() -> None:
    small = TTEmbedding(4000, 256, shape=TTShape((16, 16, 16), (4, 8, 8), 48))
    formed, path = 2 * 4096 * 256, 2 * 4 * 48 * 256 * (64 + 16)  # for each token
    assert flops_of_logits(small, 11) - flops_of_logits(small, 10) == path
    assert flops_of_logits(small, 101) - flops_of_logits(small, 100) <= formed < path
    x = torch.randn(100, 256)
    torch.testing.assert_close(small.logits(x)[:1], small.logits(x[:1]), rtol=1e-4, atol=1e-4)


def test_dense_forms_own_their_memory_and_are_frozen_where_layers_are() -> None:
    one_core = TTShape((300,), (32,), ())
    layers = TTEmbedding(300, 32, shape=one_core), TTEmbeddingBag(300, 32, shape=one_core), TTLinear(64, 64, tt_ranks=8)
    for layer in layers:
        assert all(parameter.requires_grad for parameter in layer.to_dense().parameters())
        assert layer.to_dense().weight.data_ptr() != layer.core_0.data_ptr()
        assert not any(parameter.requires_grad for parameter in layer.requires_grad_(False).to_dense().parameters())
