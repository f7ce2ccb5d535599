"""TTLinear agrees with nn.Linear over the dense weight: outputs and the gradients of every parameter and of the input."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

from comera_rec import TTLinear, TTShape
from comera_rec.rank import truncate_ranks_

# in_features, out_features, order: powers, odd sizes that need padding, primes, one feature
SIZES = [(16, 8, 2), (15, 21, 4), (31, 17, 4), (64, 27, 6), (30, 16, 8), (1, 5, 2), (7, 1, 4)]


def build(size: tuple[int, int, int], rank: int = 3, dtype: torch.dtype = torch.float64, bias: bool = True) -> TTLinear:
    shape = TTShape.for_linear(size[0], size[1], tt_ranks=rank, order=size[2])
    layer = TTLinear(size[0], size[1], bias, shape=shape, dtype=dtype)
    with torch.no_grad():
        for diagonal in layer.rank_parameters():
            diagonal.uniform_(0.5, 1.5)
    return layer


def assert_same_as_dense(layer: TTLinear, x: Tensor) -> None:
    x = x.requires_grad_()
    expected = F.linear(x, layer.dense_matrix().mT, layer.bias)
    actual = layer(x)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(actual, layer.to_dense()(x))
    torch.testing.assert_close(actual, F.linear(x, layer.weight, layer.bias))
    weights = torch.randn_like(expected)
    inputs = [*layer.parameters(), x]
    torch.testing.assert_close(
        torch.autograd.grad((actual * weights).sum(), inputs), torch.autograd.grad((expected * weights).sum(), inputs)
    )


@pytest.mark.parametrize("size", SIZES, ids=lambda size: "{}x{}-order{}".format(*size))
def test_outputs_and_gradients(size: tuple[int, int, int]) -> None:
    for dtype, bias in itertools.product((torch.float32, torch.float64), (True, False)):
        assert_same_as_dense(build(size, dtype=dtype, bias=bias), torch.randn(9, size[0], dtype=dtype))


def test_inputs_of_another_type_are_refused_unless_autocast_converts_them() -> None:
    layer = TTLinear(15, 21, tt_ranks=4)
    for dtype in (torch.float64, torch.int64):
        with pytest.raises(ValueError, match=f"input is {dtype} and the layer torch.float32: give one type, or floats under"):
            layer(torch.ones(2, 15, dtype=dtype))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.ones(2, 15, dtype=torch.float16)).dtype == torch.bfloat16
        with pytest.raises(ValueError, match=r"input is torch\.int64"):
            layer(torch.ones(2, 15, dtype=torch.int64))


def test_backward_keeps_only_the_input_and_tensors_of_rank_columns() -> None:
    layer, x = TTLinear(60, 70, tt_ranks=4), torch.randn(1000, 60, requires_grad=True)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x)
    assert max(tensor.numel() for tensor in kept if tensor.data_ptr() != x.data_ptr()) == 1000 * 4  # x L


def test_compiled_layers_accept_any_batch_in_one_graph_and_see_truncated_ranks() -> None:
    layer = TTLinear(1000, 500, tt_ranks=64)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")

    def compare(*leading: int) -> None:
        x = torch.randn(*leading, 1000, requires_grad=True)
        actual, expected = compiled(x), layer(x)
        torch.testing.assert_close(actual, expected)
        inputs = [x, *layer.parameters()]
        torch.testing.assert_close(torch.autograd.grad(actual.sum(), inputs), torch.autograd.grad(expected.sum(), inputs))

    for leading in ((1,), (2, 3), (300,), (0,)):
        compare(*leading)
    with torch.no_grad():
        for diagonal in layer.rank_parameters():
            diagonal[2:] = 0
    truncate_ranks_(layer, threshold=0.4)
    compare(5)


def test_exported_layers_accept_any_batch() -> None:
    layer = TTLinear(1000, 500, tt_ranks=64)
    exported = torch.export.export(layer, (torch.randn(5, 1000),), dynamic_shapes=({0: torch.export.Dim("batch", min=0)},)).module()
    for batch in (0, 1, 7, 400):
        x = torch.randn(batch, 1000)
        torch.testing.assert_close(exported(x), layer(x))


def test_a_vanished_layer_is_its_bias() -> None:
    for bias in (True, False):
        layer = build((15, 21, 4), bias=bias)
        layer.resize_ranks_((0, 0, 0))
        actual = layer(torch.randn(4, 15, dtype=torch.float64))
        assert torch.equal(actual, (layer.bias if layer.bias is not None else torch.zeros(21, dtype=torch.float64)).expand(4, 21))
        assert torch.equal(actual, layer.to_dense()(torch.randn(4, 15, dtype=torch.float64)))


@pytest.mark.parametrize(("size", "batch"), [((64, 27, 6), 16), ((1024, 1024, 4), 300)])
def test_autocast_computes_in_bfloat16_and_keeps_float_gradients(size: tuple[int, int, int], batch: int) -> None:
    layer = build(size, rank=8 if size[2] == 6 else 64, dtype=torch.float32)
    x = torch.randn(batch, size[0])
    expected = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = layer(x)
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.float(), expected, rtol=0, atol=8 * 2**-8 * float(expected.detach().abs().max()))
    actual.float().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float32, name
        assert parameter.grad.any(), name


@pytest.mark.parametrize("order", [2, 4, 6])
def test_initial_weights_and_bias_are_spread_like_those_of_a_dense_layer(order: int) -> None:
    dense = nn.Linear(512, 384)
    shape = TTShape.for_linear(512, 384, tt_ranks=32, order=order)
    layers = [TTLinear(512, 384, shape=shape) for _ in range(10)]
    variance = torch.stack([layer.dense_matrix().detach().var() for layer in layers]).mean()
    assert float(variance.sqrt()) == pytest.approx(float(dense.weight.detach().std()), rel=0.05)
    biases = torch.cat([layer.bias.detach() for layer in layers if layer.bias is not None])
    assert float(biases.abs().max()) <= 512**-0.5
    assert float(biases.std()) == pytest.approx((3 * 512) ** -0.5, rel=0.05)


def test_cores_must_stay_parameters() -> None:
    layer = prune.l1_unstructured(TTLinear(16, 16, tt_ranks=2), "core_0", 0.5)
    with pytest.raises(ValueError, match=r"core_0 of a TTLinear isn't a parameter any more: don't parametrize or prune TT modules"):
        layer(torch.ones(1, 16))
