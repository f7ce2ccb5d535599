"""TTLinear agrees with its definition over the dense weight, in outputs and gradients; which layers compress_ replaces."""

import copy
import logging
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuse
from torch import Tensor, nn
from torch.nn.utils import prune

from comera_rec import LinearCompression, TTLinear, TTShape, compress_, export_dense
from comera_rec.nn import named_tt_modules
from comera_rec.ops.tt_linear import reference
from comera_rec.rank import count_tt_params, size_surrogate, truncate_ranks_


@st.composite
def layers(draw: st.DrawFn) -> tuple[TTLinear, Tensor]:
    """Draw a layer and a batch; all numbers are positive so that no sum cancels, and features may be fewer than the modes'."""
    modes = st.lists(st.integers(1, 4), min_size=1, max_size=4)
    rows, cols = tuple(draw(modes)), tuple(draw(modes))
    bonds = len(rows) + len(cols) - 1
    ranks = draw(st.lists(st.integers(0 if draw(st.booleans()) else 1, 4), min_size=bonds, max_size=bonds))
    shape = TTShape(rows + (1,) * len(cols), (1,) * len(rows) + cols, ranks)
    features = draw(st.integers(1, math.prod(rows))), draw(st.integers(1, math.prod(cols)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    layer = TTLinear(*features, draw(st.booleans()), shape=shape, dtype=dtype)
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    return layer, torch.rand(*draw(st.lists(st.integers(0, 3), max_size=3)), features[0], dtype=dtype).add_(0.5)


@settings(max_examples=150)
@given(layers())
def test_any_layer_any_batch(case: tuple[TTLinear, Tensor]) -> None:
    layer, x = case
    inputs = [*layer.parameters(), x.requires_grad_()]
    actual = layer(x)
    assert actual.is_contiguous()
    expected = reference.tt_linear(x, layer.cores(), layer.rank_parameters(), layer.out_features, layer.bias)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(layer.to_dense()(x), expected)
    torch.testing.assert_close(F.linear(x, layer.weight, layer.bias), expected)
    upstream = torch.rand_like(expected)
    torch.testing.assert_close(*(torch.autograd.grad((out * upstream).sum(), inputs) for out in (actual, expected)))


@pytest.mark.parametrize("order", [2, 3, 4])
def test_gradients_of_second_order(order: int) -> None:
    inputs = order // 2
    shape = TTShape((2,) * inputs + (1,) * (order - inputs), (1,) * inputs + (2,) * (order - inputs), 2)
    layer = TTLinear(shape.num_rows - 1, shape.num_cols - 1, shape=shape, dtype=torch.float64)
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def output(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), x)

    leaves = torch.rand(2, shape.num_rows - 1, dtype=torch.float64, requires_grad=True), *parameters
    assert torch.autograd.gradgradcheck(output, leaves)


def test_inputs_of_another_type_are_refused_unless_autocast_converts_them() -> None:
    layer = TTLinear(15, 21, tt_ranks=4)
    for dtype in (torch.float64, torch.int64):
        refuse(f"input is {dtype} and the layer torch.float32: give one type, or floats", layer, torch.ones(2, 15, dtype=dtype))
    with torch.autocast("cpu", torch.bfloat16):
        rough = layer(torch.ones(2, 15, dtype=torch.float16))
        refuse(r"input is torch\.int64", layer, torch.ones(2, 15, dtype=torch.int64))
    torch.testing.assert_close(rough, layer(torch.ones(2, 15)).bfloat16(), rtol=0.05, atol=0.02)
    assert {gradient.dtype for gradient in torch.autograd.grad(rough.float().sum(), list(layer.parameters()))} == {torch.float32}


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
    refuse(r"core_0 of a TTLinear isn't a parameter any more: don't parametrize or prune TT modules", layer, torch.ones(1, 16))


def tt_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, TTLinear)]


def test_policy_auto_leaves_layers_that_would_not_get_smaller_and_faster() -> None:
    assert LinearCompression(tt_ranks=(200,)).decide(256, 256).shape is None
    assert LinearCompression(tt_ranks=200, order=2, policy="always").decide(256, 256).shape is not None
    # Fewer parameters, but the middle rank needs about as many multiply-adds as the dense layer.
    assert LinearCompression(tt_ranks=(32, 500, 32)).decide(1024, 1024).shape is None
    # It decides for the batch.
    assert LinearCompression(tt_ranks=16, batch=4096).decide(256, 256).shape is not None
    assert LinearCompression(tt_ranks=16, batch=8).decide(256, 256).shape is None


@pytest.mark.parametrize("batch_first", [True, False])
def test_torchs_transformer_encoder_calls_its_layers_in_both_modes(batch_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=batch_first)
    dense = nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first)
    model = compress_(copy.deepcopy(dense), linears=LinearCompression(tt_ranks=10**6, policy="always"), init="tt_svd")
    assert tt_names(model) == [f"layers.{k}.linear{i}" for k in (0, 1) for i in (1, 2)], "attention stays dense"
    x = torch.randn(3, 5, 128) if batch_first else torch.randn(5, 3, 128)
    padded = torch.tensor([[False] * 5, [False] * 4 + [True], [False] * 2 + [True] * 3])
    trained = model(x, src_key_padding_mask=padded)
    torch.testing.assert_close(trained, dense(x, src_key_padding_mask=padded), rtol=1e-4, atol=1e-4)
    monkeypatch.delattr(TTLinear, "weight")  # which torch's fast path would form at every call
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x, src_key_padding_mask=padded), trained, rtol=1e-4, atol=1e-4)


def tied(bias: bool = True) -> nn.Sequential:
    """Two layers that share a weight, with separate biases, and a third layer."""
    model = nn.Sequential(nn.Linear(256, 256, bias), nn.Tanh(), nn.Linear(256, 256, bias), nn.Linear(256, 256))
    model[2].weight = model[0].weight
    return model


def assert_tied(model: nn.Sequential) -> None:
    first, second = model[0], model[2]
    assert first.shape == second.shape
    for name, parameter in first.named_parameters():
        assert (getattr(second, name) is parameter) == (name != "bias"), name
    x = torch.randn(3, 256, dtype=first.core_0.dtype)
    torch.testing.assert_close(*(layer(x) - (0 if layer.bias is None else layer.bias) for layer in (second, first)))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("init", ["random", "tt_svd"])
def test_layers_that_share_a_weight_stay_tied(init: str, bias: bool) -> None:
    dense = tied(bias).double()
    model = compress_(copy.deepcopy(dense), linears=LinearCompression(tt_ranks=10**6, policy="always"), init=init)
    assert tt_names(model) == ["0", "2", "3"]
    assert model[3].core_0 is not model[0].core_0
    assert_tied(model)
    if init == "tt_svd":
        x = torch.randn(3, 256, dtype=torch.float64)
        torch.testing.assert_close(model(x), dense(x))
        exported = export_dense(model)
        assert exported[0].weight is exported[2].weight
        torch.testing.assert_close(exported(x), dense(x))
    assert_tied(copy.deepcopy(model))


def test_tied_layers_change_their_ranks_together() -> None:
    model = compress_(tied(), linears=LinearCompression(tt_ranks=8))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x = torch.randn(3, 256)
    assert count_tt_params(model) == model[0].shape.num_params + model[3].shape.num_params, "a tied weight counts once"
    assert float(size_surrogate(module for _, module in named_tt_modules(model)).detach()) == pytest.approx(count_tt_params(model))
    model(x).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        model[0].rank_2[2:] = 0
    expected = model(x)
    assert truncate_ranks_(model, optimizer, threshold=0.1)["0"][1] == 2
    assert_tied(model)
    torch.testing.assert_close(model(x), expected)
    model(x).square().mean().backward()
    optimizer.step()
    saved = copy.deepcopy(model.state_dict())
    resumed = compress_(tied(), linears=LinearCompression(tt_ranks=3))
    resumed.load_state_dict(saved)
    assert_tied(resumed)
    assert torch.equal(resumed(x), model(x))


def test_weights_shared_with_what_stays_dense_stay_dense(caplog: pytest.LogCaptureFixture) -> None:
    # The output layer of a language model may have the weight of its token embedding.
    layers = {"embedding": nn.Embedding(300, 128), "body": nn.Linear(128, 128), "output": nn.Linear(128, 300, bias=False)}
    layers["output"].weight = layers["embedding"].weight
    model = nn.ModuleDict({"scores": nn.ModuleDict(layers), "tied": tied()})
    owners = [layers["output"], layers["embedding"], model["tied"][0], model["tied"][2]]
    weights = [owner.weight for owner in owners]
    with caplog.at_level(logging.INFO, logger="comera_rec"):
        compress_(model, linears=LinearCompression(tt_ranks=4, policy="always"), filter_fn=lambda module, name: name != "tied.2")
    assert tt_names(model) == ["scores.body", "tied.3"]
    assert all(owner.weight is weight for owner, weight in zip(owners, weights, strict=True))
    assert "scores.output: 128 x 300, stays dense: its weight is also that of 'scores.embedding'" in caplog.messages
    assert "tied.0: 256 x 256, stays dense: its weight is also that of 'tied.2'" in caplog.messages
    for dense in (layers["output"], nn.MultiheadAttention(128, 4)):  # whose linear layer is of a subclass
        with pytest.raises(ValueError, match="no linear layer was compressed"):
            compress_(dense, linears=LinearCompression(tt_ranks=4), filter_fn=lambda module, name: module is not owners[0])


def test_a_bias_that_layers_share_stays_shared() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    model[1].bias = model[0].bias
    values = model[0].bias.detach().clone()
    compress_(model, linears=LinearCompression(tt_ranks=4), init="tt_svd")
    assert model[0].bias is model[1].bias
    assert torch.equal(model[0].bias, values)
    assert model[0].core_0 is not model[1].core_0


def test_hooks_stay_and_computed_weights_stay_dense(caplog: pytest.LogCaptureFixture) -> None:
    pruned = prune.random_unstructured(nn.Linear(64, 64), "weight", 0.5)
    model = nn.Sequential(nn.Linear(64, 64), nn.utils.spectral_norm(nn.Linear(64, 64)), pruned)
    handle = model[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    x = torch.randn(3, 64)
    expected = model.eval()(x)
    with caplog.at_level(logging.INFO):
        compress_(model, linears=LinearCompression(tt_ranks=256, min_features=8, policy="always"), init="tt_svd")
    assert [type(layer) for layer in model] == [TTLinear, nn.Linear, nn.Linear]
    assert caplog.text.count("stays dense: its weight is computed from other parameters") == 2
    torch.testing.assert_close(model(x), expected, rtol=1e-3, atol=1e-4)
    doubled = model[0](x)
    handle.remove()
    torch.testing.assert_close(model[0](x), doubled / 2)


def test_compiled_layers_accept_any_batch_in_one_graph_and_see_truncated_ranks() -> None:
    layer = TTLinear(1000, 500, tt_ranks=64)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for leading in ((1,), (2, 3), (300,), (0,), (5,)):
        if leading == (5,):
            with torch.no_grad():
                for diagonal in layer.rank_parameters():
                    diagonal[2:] = 0
            truncate_ranks_(layer, threshold=0.4)
        x = torch.randn(*leading, 1000, requires_grad=True)
        outputs = compiled(x), layer(x)
        torch.testing.assert_close(*outputs)
        torch.testing.assert_close(*(torch.autograd.grad(output.sum(), [x, *layer.parameters()]) for output in outputs))
