"""TTEmbeddingBag agrees with nn.EmbeddingBag over the dense matrix: outputs and the gradients of every parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera_rec import TTEmbeddingBag, TTLinear, TTShape
from comera_rec.tt import is_slice_major

# Table sizes, modes and ranks: orders 1 to 4, primes whose last rows and columns are padding, rank 1, sizes that fit exactly.
SHAPES = [
    (35, 6, TTShape((7, 5), (3, 2), (4,))),
    (31, 7, TTShape((7, 5), (4, 2), (1,))),
    (101, 11, TTShape((7, 5, 3), (3, 2, 2), (4, 5))),
    (97, 16, TTShape((4, 3, 3, 3), (2, 2, 2, 2), (2, 3, 2))),
    (35, 6, TTShape((35,), (6,), ())),
]
every_size = pytest.mark.parametrize("size", SHAPES, ids=lambda size: f"order{size[2].order}")
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)  # compiled, and in plain torch
every_mode = pytest.mark.parametrize("mode", ["sum", "mean", "max"])


def build(size: tuple[int, int, TTShape], dtype: torch.dtype = torch.float64, **arguments: object) -> TTEmbeddingBag:
    """Build a bag whose rank parameters differ from 1, so that their gradients are tested as well."""
    bag = TTEmbeddingBag(size[0], size[1], shape=size[2], dtype=dtype, **arguments)  # type: ignore[arg-type]
    with torch.no_grad():
        for rank in bag.rank_parameters():
            rank.uniform_(0.5, 1.5)
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
@every_mode
@every_size
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
    bag = TTEmbeddingBag(101, 11, shape=shape, hot_rows=((50, 2),), impl=impl)
    nn.init.normal_(next(bag.hot_blocks()).core_0)  # it starts at zero
    ids, offsets = jagged(101)
    weights = torch.rand(len(ids))
    expected = bag(ids, offsets, weights)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = bag(ids, offsets, weights)
    assert_same(actual, expected, list(bag.parameters()))


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()  # otherwise graphs of other modules count as recompilations
    yield
    torch._dynamo.reset()


def compare_with_eager(bag: TTEmbeddingBag, compiled: Callable[..., Tensor], batches: Sequence[tuple[Tensor, ...]]) -> None:
    for batch in batches:
        assert_same(compiled(*batch), bag(*batch), list(bag.parameters()))


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(("size", "mode"), [(SHAPES[3], "sum"), (SHAPES[2], "max")])
def test_torch_compile_traces_batches_of_any_size_in_one_graph(size: tuple[int, int, TTShape], mode: str) -> None:
    bag = build(size, torch.float32, mode=mode)
    ids, offsets = jagged(size[0])
    compiled = torch.compile(bag, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        compare_with_eager(bag, compiled, [(ids, offsets), (ids.repeat(4), offsets), (ids[:5], offsets[:3])])


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # caused by the compiler itself
@pytest.mark.parametrize("size", [SHAPES[0], SHAPES[3]])
def test_torch_compile_with_inductor(size: tuple[int, int, TTShape]) -> None:
    bag = build(size, torch.float32)
    ids, offsets = jagged(size[0])
    weights = torch.rand(len(ids))
    compiled = torch.compile(bag, fullgraph=True)
    compare_with_eager(bag, compiled, [(ids, offsets, weights), (ids.flip(0), offsets, weights)])
    compare_with_eager(bag, compiled, [(ids, torch.arange(len(ids)))])


@pytest.mark.parametrize(("last", "strict"), [(True, True), (False, False)])
def test_an_exported_bag_takes_any_number_of_ids_and_bags(last: bool, strict: bool) -> None:
    bag = build(SHAPES[0], torch.float32, include_last_offset=last).eval()

    def batch(ids: Tensor, starts: list[int]) -> tuple[Tensor, Tensor]:
        return ids, torch.tensor([*starts, len(ids)] if last else starts)

    any_size = {0: torch.export.Dim.DYNAMIC}
    exported = torch.export.export(bag, batch(torch.arange(9), [0, 2, 5]), dynamic_shapes=(any_size, any_size), strict=strict)
    batches = [batch(torch.arange(14), [0, 2, 5]), batch(torch.arange(14), [0, 3, 3, 8, 10]), batch(torch.arange(4), [0, 1])]
    compare_with_eager(bag, exported.module(), batches)


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


SAVED, LOADING = TTShape((7, 5, 3), (3, 2, 2), (2, 5)), TTShape((7, 5, 3), (3, 2, 2), (4, 3))


def spoil(state: dict[str, Tensor], how: str) -> dict[str, Tensor]:
    """Change a state dict so that a bag with the modes of `SAVED` can't load it."""
    if how.startswith("without "):
        return {name: value for name, value in state.items() if name != how.removeprefix("without ")}
    if how == "other modes":
        return build((101, 11, TTShape((7, 3, 5), (3, 2, 2), (2, 5)))).state_dict()
    if how == "fewer cores":
        return build((35, 6, TTShape((7, 5), (3, 2), (4,)))).state_dict()
    if how == "more cores":  # the first three of them would fit
        more = build((101, 11, TTShape((7, 5, 3, 1), (3, 2, 2, 1), (2, 5, 1)))).state_dict()
        return {name: value for name, value in more.items() if name != "rank_3"}
    if how == "no numbers":
        return {name: value.to("meta") for name, value in state.items()}
    name, value = how.split(" is ")
    return {**state, name: torch.ones(*map(int, value.split("x")), dtype=torch.float64)}


@pytest.mark.parametrize("shape", [LOADING, SAVED], ids=["other ranks", "the same ranks"])
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("without rank_1", "user: a TTEmbeddingBag loads all of its tensors or none, and the state dict lacks rank_1: complete it"),
        ("without core_1", "lacks core_1"),
        ("other modes", "size mismatch"),
        ("fewer cores", "lacks core_2, rank_2"),
        ("more cores", "has more than 3 cores: load one of a module of the same modes"),
        ("no numbers", "is on the meta device, without values: load one that has them"),
        ("rank_2 is 4", "size mismatch"),
        ("core_2 is 4x3x2x1", "size mismatch"),
        ("core_0 is 21x2", "size mismatch"),
    ],
)
def test_a_state_dict_that_does_not_fit_changes_nothing(how: str, message: str, shape: TTShape) -> None:
    bag = build((101, 11, shape))
    before, parameters = values(bag), list(bag.parameters())
    state = spoil(dict(build((101, 11, SAVED)).state_dict()), how)
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=message):
            nn.ModuleDict({"user": bag}).load_state_dict({f"user.{name}": value for name, value in state.items()}, strict=strict)
    assert_unchanged(bag, shape, before, parameters)


def test_a_dense_state_dict_says_how_to_convert_it() -> None:
    """With strict=False, which loads the rest of a model, tables keep their values; a layer's bias alone is never loaded."""
    model = nn.ModuleDict({"user": build((101, 11, LOADING)), "head": TTLinear(11, 64, tt_ranks=2)})
    before = values(model["user"])
    with (
        pytest.raises(RuntimeError, match="Missing key"),
        pytest.warns(UserWarning, match=r"convert that with comera_rec\.compress_"),
    ):
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
    nn.ModuleDict({"user": bag}).load_state_dict(nn.ModuleDict({"user": saved}).state_dict(), assign=assign)
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
