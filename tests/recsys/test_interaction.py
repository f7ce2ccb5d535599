"""Interactions equal TorchRec's in values and gradients, products of pairs also in second-order gradients."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuse
from torch import Tensor, nn
from torchrec import KeyedTensor
from torchrec.models.dlrm import InteractionArch
from torchrec.modules.crossnet import LowRankCrossNet

from comera_rec.ops import interact
from comera_rec.ops.interaction import pairwise_products
from comera_rec.recsys.dlrm import CrossNetwork, LearnedVector, PairwiseInteraction, stack_features


def inputs(batch: int, features: int, dim: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    dense, sparse = torch.randn(batch, dim, dtype=dtype), torch.randn(batch, features, dim, dtype=dtype)
    return dense.requires_grad_(), sparse.requires_grad_()


# Rows that may be parts of wider ones: from [B, 2 F + 1, N] to [B, F, N].
LAYOUTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "plain": lambda wide, features: wide[:, :features].contiguous(),
    "neighbors": lambda wide, features: wide[:, 1 : features + 1],
    "every other": lambda wide, features: wide[:, 1::2],
    "backwards": lambda wide, features: wide[:, :features].flip(0),
    "of one sample": lambda wide, features: wide[:1, :features].expand(len(wide), -1, -1),
    "transposed": lambda wide, features: wide.mT.contiguous().mT[:, :features],
    "one of any stride": lambda wide, features: wide[:, :features].contiguous().as_strided(
        (len(wide), features, wide.shape[2]), (features * wide.shape[2], 7 if features == 1 else wide.shape[2], 1)
    ),
}  # fmt: skip


@settings(max_examples=150)
@given(
    batch=st.integers(0, 70), features=st.integers(1, 26), dim=st.integers(1, 66),
    dtype=st.sampled_from([torch.float32, torch.float64]), layout=st.sampled_from(list(LAYOUTS)),
)  # fmt: skip
def test_equals_torchrec(batch: int, features: int, dim: int, dtype: torch.dtype, layout: str) -> None:
    wide = torch.randn(batch, 2 * features + 1, dim, dtype=dtype, requires_grad=True)
    dense = torch.randn(batch, 2 * dim, dtype=dtype, requires_grad=True)
    upstream = torch.randn(batch, dim + features * (features + 1) // 2, dtype=dtype)
    results = []
    for module, exact in ((PairwiseInteraction(features), dtype), (InteractionArch(features), torch.float64)):
        out = module(dense.to(exact)[:, ::2], LAYOUTS[layout](wide.to(exact), features))
        results.append([out.to(dtype), *torch.autograd.grad(out, (dense, wide), upstream.to(exact))])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4 if dtype == torch.float32 else 1e-9)


def test_results_do_not_depend_on_threads(on_threads: Callable) -> None:
    dense, rows = inputs(300, 9, 24, torch.float32)
    one, three = (on_threads(count, lambda: interact(dense, rows, torch.triu_indices(10, 10, offset=1))) for count in (1, 3))
    assert torch.equal(one, three)


def test_the_registrations_follow_torch_librarys_rules() -> None:
    lead, rows = torch.randn(5, 4), torch.randn(5, 3, 4)
    torch.library.opcheck(torch.ops.comera_rec.interact.default, (lead, rows))
    torch.library.opcheck(torch.ops.comera_rec.interact_backward.default, (torch.randn(5, 10), lead, rows))


def test_bad_arguments_are_refused() -> None:
    ops, lead, rows = torch.ops.comera_rec, torch.ones(2, 4), torch.ones(2, 1, 4)
    refuse(r"lead has shape \(2, 4\) and rows \(3, 1, 4\): give \(B, N\) and", ops.interact, lead, torch.ones(3, 1, 4))
    refuse("lead is not float32: convert it", ops.interact, lead.double(), rows)
    refuse("rows is not float32 on CPU: convert it, or move it", ops.interact, lead, rows.double())
    refuse("rows has rows apart from each other: copy it", ops.interact, lead, torch.ones(2, 4, 3).mT)
    refuse("there are 2 samples with 5 outputs each", ops.interact_backward, torch.ones(2, 6), lead, rows)


@pytest.mark.parametrize("first_column", [0, 3])
def test_second_derivatives_in_float32(first_column: int) -> None:
    """Also of views, whose rows have other strides than their gradients."""

    def penalty(dtype: torch.dtype) -> list[Tensor]:
        wide, rows = (values.detach().to(dtype).requires_grad_() for values in inputs(4, 3, 5))
        dense = torch.cat([torch.zeros(4, first_column, dtype=dtype), wide], dim=1)[:, first_column:]
        out = interact(dense, rows, torch.triu_indices(4, 4, offset=1))
        grads = torch.autograd.grad(out.square().sum(), (wide, rows), create_graph=True)
        return [grad.float() for grad in torch.autograd.grad(sum(grad.square().sum() for grad in grads), (wide, rows))]

    torch.testing.assert_close(penalty(torch.float32), penalty(torch.float64), rtol=1e-4, atol=1e-3)


def test_gradients_of_second_order() -> None:
    features = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    pairs = torch.triu_indices(4, 4, offset=1)
    assert torch.autograd.gradgradcheck(pairwise_products, (features, pairs))


def test_a_vector_for_numbers_takes_batches_of_any_size_when_captured() -> None:
    program = torch.export.export(LearnedVector(8), (torch.zeros(5, 0),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    assert program.module()(torch.zeros(3, 0)).shape == (3, 8)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # caused by torch.compile itself
def test_under_autocast_and_compile() -> None:
    module = PairwiseInteraction(6)
    dense, sparse = inputs(9, 6, 8, torch.float32)
    exact = module(dense, sparse)
    with torch.autocast("cpu", torch.bfloat16):
        rough = module(dense, sparse)
    rough.float().sum().backward()
    torch.testing.assert_close(rough.float(), exact, rtol=0.02, atol=0.05)
    torch.testing.assert_close(torch.compile(module, fullgraph=True, backend="aot_eager")(dense, sparse), exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cross_network_computes_and_learns_what_torchrec_does(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ours, stock = CrossNetwork(24, 3, 5).to("meta").to_empty(device="cpu"), LowRankCrossNet(24, 3, 5)
    for part in ours.children():  # as DistributedModelParallel does
        part.reset_parameters()
    assert all(0.2 < kernel.std() < 0.4 for kernel in (*ours.V_kernels, *ours.W_kernels))
    with torch.no_grad():
        for bias in ours.bias:
            bias.normal_()
    stock.load_state_dict(ours.state_dict())
    values = torch.randn(11, 24)
    grads = []
    for network in (ours, stock):
        x = values.clone().requires_grad_()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            network(x).float().square().mean().backward()
        grads.append([x.grad, *(parameter.grad for parameter in network.parameters())])
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(grads[0], grads[1], **tolerance)
    traced = torch.fx.symbolic_trace(nn.Sequential(ours))  # as one call
    torch.testing.assert_close(traced(values), ours(values))


def test_a_graph_of_a_cross_network_may_be_retained_but_not_differentiated_twice() -> None:
    network, x = CrossNetwork(24, 3, 5), torch.randn(7, 24, requires_grad=True)
    inputs = (x, *network.parameters())
    crossed = network(x)
    once = torch.autograd.grad(crossed.sum(), inputs, retain_graph=True)
    again = torch.autograd.grad(crossed.sum(), inputs, create_graph=True)
    torch.testing.assert_close(again, once)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        again[0].sum().backward()


@pytest.mark.parametrize("order", [["a", "b", "c"], ["c", "a", "b"]])
def test_features_are_stacked_without_a_copy_where_their_order_allows(order: list[str]) -> None:
    values = torch.randn(5, 12, requires_grad=True)
    pooled = KeyedTensor(keys=order, length_per_key=[4, 4, 4], values=values)
    stacked = stack_features(pooled, ["a", "b", "c"], 4)
    assert (stacked.data_ptr() == values.data_ptr()) == (order == ["a", "b", "c"])
    torch.testing.assert_close(stacked, torch.stack([pooled[name] for name in "abc"], dim=1))
    stacked[:, 0].sum().backward()
    start = 4 * order.index("a")
    assert values.grad[:, start : start + 4].eq(1).all()
    assert values.grad.sum() == 20
