"""TTLinear in float8 agrees with its definition for every order of products, and with float32; also compiled and recomputed."""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from comera_rec import TTEmbedding, TTLinear, TTShape
from comera_rec.nn import EncoderBlock, use_float8_
from comera_rec.ops import tt_linear
from comera_rec.ops.float8_matmul import reference
from comera_rec.tt import candidate_contractions


def bfloat16(call: Callable[[], Tensor], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    with torch.autocast("cpu", dtype):
        return call()


def outcome(layer: nn.Module, x: Tensor, upstream: Tensor, call: Callable | None = None) -> list[Tensor]:
    """Output and the gradients of the input and of every parameter, under autocast."""
    out = bfloat16(lambda: (layer if call is None else call)(x))
    leaves = [x, *layer.parameters()]
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype), materialize_grads=True)]


def distance(actual: Tensor, expected: Tensor) -> float:
    """Relative error by norms."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm())


@pytest.fixture
def forgetful_compiler() -> Iterator[None]:
    """Keep compilations of this test from counting toward other tests' recompilation limits."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def build(rank: int = 12) -> TTLinear:
    return TTLinear(96, 80, tt_ranks=rank)


@pytest.mark.parametrize("order", [2, 3, 4, 5])
def test_every_contraction_equals_the_definition_and_nearly_the_exact_values(order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, cols = (5, 4, 3)[: order // 2], (4, 6, 3)[: order - order // 2]
    shape = TTShape(rows + (1,) * len(cols), (1,) * len(rows) + cols, tuple(range(6, order + 5)))
    sizes = [*shape.core_shapes, *((rank,) for rank in shape.ranks)]
    # Positive, so that rounded values don't cancel.
    *tt_parameters, x = (torch.rand(size).add_(0.5).requires_grad_() for size in (*sizes, (21, math.prod(rows) - 1)))
    bias, upstream = torch.rand(math.prod(cols) - 1).requires_grad_(), torch.rand(21, math.prod(cols) - 1)
    leaves = [x, bias, *tt_parameters]

    def outcome_of(contraction: tuple, float8: bool) -> list[Tensor]:
        out = tt_linear(x, tt_parameters[:order], tt_parameters[order:], math.prod(cols) - 1, bias, contraction, float8)
        assert out.dtype == (torch.bfloat16 if float8 else torch.float32)
        return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]

    contractions = list(candidate_contractions(shape))
    actual = [outcome_of(contraction, True) for contraction in contractions]
    exact = outcome_of(contractions[0], False)
    products = []

    def defined_matmul(*arguments: Tensor) -> Tensor:
        products.append(contraction)
        return reference.float8_matmul(*arguments)

    monkeypatch.setattr(importlib.import_module(tt_linear.__module__), "float8_matmul", defined_matmul)
    for contraction, parts in zip(contractions, actual, strict=True):
        for part, defined, without in zip(parts, outcome_of(contraction, True), exact, strict=True):
            assert distance(part, defined) < 0.005, contraction
            assert distance(part, without) < 0.1, contraction
        assert products.count(contraction) == order, "all products, including those of cores with cores"


@pytest.mark.parametrize("batch", [1, 16, 300])
def test_a_layer_is_within_a_tenth_of_float32(batch: int) -> None:
    layer, x, upstream = TTLinear(512, 384, tt_ranks=30), torch.randn(batch, 512, requires_grad=True), torch.randn(batch, 384)
    exact = outcome(layer, x, upstream, call=lambda x: F.linear(x.double(), layer.dense_matrix().double().mT, layer.bias.double()))
    actual = outcome(use_float8_(layer), x, upstream)
    assert actual[0].dtype == torch.bfloat16
    assert {part.dtype for part in actual[1:]} == {torch.float32}
    errors = [distance(*pair) for pair in zip(actual, exact, strict=True)]
    assert max(errors) < 0.2
    assert sum(errors) / len(errors) < 0.1


def test_float8_needs_autocast_to_bfloat16() -> None:
    layer, x = build(), torch.randn(40, 96)
    use_float8_(float8 := copy.deepcopy(layer))
    assert torch.equal(float8(x), layer(x))
    assert torch.equal(bfloat16(lambda: float8(x), torch.float16), bfloat16(lambda: layer(x), torch.float16))
    rounded, plain = bfloat16(lambda: float8(x)), bfloat16(lambda: layer(x))
    assert 0.02 < distance(rounded, plain) < 0.1
    float8.float8 = False
    assert torch.equal(bfloat16(lambda: float8(x)), plain)


@pytest.mark.parametrize("leading", [(), (0,), (2, 3), (2, 0)])
def test_any_leading_dimensions_and_zeros(leading: tuple[int, ...]) -> None:
    layer = use_float8_(build())
    x = torch.zeros(*leading, 96, requires_grad=True)
    out, grad, *parameter_grads = outcome(layer, x, torch.ones(*leading, 80))
    assert torch.equal(out, layer.bias.detach().bfloat16().expand(*leading, 80))
    assert grad.shape == x.shape
    *tt_grads, bias_grad = parameter_grads
    assert not any(part.any() for part in tt_grads)
    assert torch.equal(bias_grad, torch.full((80,), float(math.prod(leading))))


def test_a_vanished_layer_is_its_bias() -> None:
    layer = use_float8_(build())
    layer.resize_ranks_([0] * len(layer.shape.ranks))
    assert torch.equal(bfloat16(lambda: layer(torch.randn(4, 96))), layer.bias.detach().bfloat16().expand(4, 80))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_gradients_that_are_not_finite_are_propagated(value: float) -> None:
    layer, upstream = use_float8_(build()), torch.randn(40, 80)
    upstream[3, 4] = value
    assert all(not part.isfinite().all() for part in outcome(layer, torch.randn(40, 96, requires_grad=True), upstream)[1:])


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own warning while tracing
def test_compiled_layers_take_any_batch_in_one_graph(forgetful_compiler: None) -> None:
    layer = use_float8_(TTLinear(1000, 500, tt_ranks=30))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for leading in ((2, 3), (301,), (320,), (0,)):
        x, upstream = torch.randn(*leading, 1000, requires_grad=True), torch.randn(*leading, 500)
        torch.testing.assert_close(outcome(layer, x, upstream, compiled), outcome(layer, x, upstream))


def test_recomputed_activations_are_the_same() -> None:
    """Checkpointing calls the layer again in the backward pass, where only autocast's context is restored."""
    layer, x, upstream = use_float8_(build()), torch.randn(40, 96, requires_grad=True), torch.randn(40, 80)
    actual = outcome(layer, x, upstream, lambda x: checkpoint(layer, x, use_reentrant=False))
    assert all(map(torch.equal, actual, outcome(layer, x, upstream)))


def test_a_transformer_block_in_float8() -> None:
    block = EncoderBlock(96, 4, 192, linear=lambda n, m: TTLinear(n, m, tt_ranks=12))
    x, upstream = torch.randn(3, 7, 96, requires_grad=True), torch.randn(3, 7, 96)
    expected = outcome(block, x, upstream)
    use_float8_(block)
    assert sum(getattr(module, "float8", False) for module in block.modules()) == 6
    actual = outcome(block, x, upstream)
    assert 0.001 < distance(actual[0], expected[0]) < 0.1
    assert distance(actual[1], expected[1]) < 0.1
    assert {part.dtype for part in actual[1:]} == {torch.float32}


def test_training_reaches_the_loss_of_float32() -> None:
    """A student of a random teacher, 200 steps of Adam."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    start = nn.Sequential(TTLinear(32, 64, tt_ranks=12), nn.Tanh(), TTLinear(64, 64, tt_ranks=12), nn.Tanh(), nn.Linear(64, 1))
    x = torch.randn(256, 32)
    y = teacher(x).detach()

    def losses(student: nn.Module, autocast: bool) -> list[float]:
        optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
        actual = []
        for _ in range(200):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                out = student(x)
            loss = F.mse_loss(out.float(), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            actual.append(loss.item())
        return actual

    expected, actual = losses(copy.deepcopy(start), False), losses(use_float8_(copy.deepcopy(start)), True)
    assert expected[-1] < 0.1 * expected[0], "it learns"
    assert actual[-1] == pytest.approx(expected[-1], abs=0.02 * expected[0])


def test_layers_are_chosen_by_filter() -> None:
    model = nn.Sequential(build(), nn.Linear(80, 96), build())
    assert use_float8_(model, filter_fn=lambda module, name: name == "2") is model
    assert [getattr(module, "float8", None) for module in model] == [False, None, True]
    use_float8_(model)
    assert [getattr(module, "float8", None) for module in model] == [True, None, True]


@pytest.mark.parametrize(
    "model", [nn.Linear(4, 4), TTEmbedding(20, 8, tt_ranks=2), build()], ids=["dense", "embedding", "filtered"]
)
def test_models_without_such_layers_are_refused(model: nn.Module) -> None:
    with pytest.raises(
        ValueError, match=r"^float8 is for the products of TTLinear layers, .*: compress its linear layers first, or use"
    ):
        use_float8_(model, filter_fn=lambda module, name: name != "")


def test_a_refused_device_leaves_the_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_scaled_mm")
    model = build()
    with pytest.raises(ValueError, match="float8 products don't run on cpu"):
        use_float8_(model)
    assert not model.float8
