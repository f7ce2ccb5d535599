"""Cores: initialization matched to a dense table's standard deviation, contraction to the dense matrix, layout in memory."""

from __future__ import annotations

import copy
import io
import itertools
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import comera_rec as cr
from comera_rec.ops import plan_lookup
from comera_rec.tt import TTShape, init_cores_, is_slice_major, slice_major, tt_to_dense


def mean_square(cores: list[Tensor]) -> float:
    """Mean square of all dense entries, by contracting the cores with themselves instead of forming a billion entries."""
    gram = torch.ones(1, 1)
    for core in cores:
        gram = torch.einsum("ab,amnc,bmnd->cd", gram, core, core) / (core.shape[1] * core.shape[2])
    return float(gram)


@pytest.mark.parametrize("ranks", [1, 4, 16])
@pytest.mark.parametrize("order", [2, 3, 4])
def test_dense_entries_have_the_requested_standard_deviation(order: int, ranks: int) -> None:
    shape = TTShape.for_table(10_000_000, 64, tt_ranks=ranks, order=order)
    # Entries that share slices are dependent, so one draw is noisy: over 100 draws, 3 % is at least four standard errors.
    draws = []
    for _ in range(3 if order == 2 else 100):
        cores = [torch.empty(size) for size in shape.core_shapes]
        init_cores_(cores, shape, 0.02)
        draws.append(mean_square(cores))
    assert (sum(draws) / len(draws)) ** 0.5 == pytest.approx(0.02, rel=0.03)


def test_dense_entries_have_mean_zero_and_vanished_cores_stay() -> None:
    for shape in (TTShape.for_table(10_000, 16, tt_ranks=8), TTShape((3, 4), (2, 2), (0,))):
        cores = [torch.empty(size) for size in shape.core_shapes]
        init_cores_(cores, shape, 1.0)
        assert abs(float(tt_to_dense(cores, shape).mean())) < 0.02


def test_uninitialized_memory_is_poisoned() -> None:
    assert torch.empty(3).isnan().all()


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_tt_to_dense_is_the_sum_over_paths(order: int) -> None:
    row_shape, col_shape, ranks = (3, 2, 4, 2)[:order], (2, 3, 1, 2)[:order], (2, 3, 2)[: order - 1]
    shape = TTShape(row_shape, col_shape, ranks)
    cores = [torch.randn(size, dtype=torch.float64) for size in shape.core_shapes]
    dense = tt_to_dense(cores, shape)
    assert dense.shape == (shape.num_rows, shape.num_cols)
    for i, row in enumerate(itertools.product(*map(range, row_shape))):
        for j, column in enumerate(itertools.product(*map(range, col_shape))):
            product = torch.eye(1, dtype=torch.float64)
            for core, row_digit, column_digit in zip(cores, row, column, strict=True):
                product = product @ core[:, row_digit, column_digit, :]
            torch.testing.assert_close(dense[i, j], product[0, 0])


def test_tt_to_dense_refuses_cores_of_other_shapes() -> None:
    shape = TTShape((3, 4), (2, 2), 2)
    with pytest.raises(ValueError, match=r"cores have shapes .* but the TTShape states \[\(1, 3, 2, 2\), \(2, 4, 2, 1\)\]"):
        tt_to_dense([torch.zeros(1, 3, 2, 1), torch.zeros(1, 4, 2, 1)], shape)


sizes = st.tuples(*[st.integers(0, 4)] * 4)


def stored(core: Tensor, k: int, order: int) -> list[float]:
    """A core's numbers in the order in which a lookup reads them: slice by slice, rank by rank."""
    numbers = []
    for of_slice in core.unbind(1):  # (r_{k-1}, n, r_k)
        by_rank = of_slice.permute(0, 2, 1) if k < (order + 1) // 2 else of_slice.permute(2, 0, 1)
        numbers += by_rank.flatten().tolist()
    return numbers


@given(size=sizes, order=st.integers(1, 4), data=st.data())
def test_slices_are_stored_one_after_the_other(size: tuple[int, ...], order: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, order - 1))
    core = torch.randn(size).permute(data.draw(st.permutations(range(4))))
    laid = slice_major(core, k, order)
    assert torch.equal(laid, core)
    assert is_slice_major(laid, k, order)
    assert laid.as_strided((laid.numel(),), (1,)).tolist() == stored(core, k, order)
    assert slice_major(laid, k, order) is laid


def relaid(core: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Copy a core with its dimensions in this order in memory, outermost first."""
    return core.permute(axes).contiguous().permute([axes.index(axis) for axis in range(4)])


@given(order=st.integers(2, 4), data=st.data())
def test_the_operators_accept_only_slice_major_cores(order: int, data: st.DataObject) -> None:
    """They read memory in this order, regardless of strides."""
    k = data.draw(st.integers(0, order - 1))
    bonds = [1, *data.draw(st.lists(st.integers(0, 3), min_size=order - 1, max_size=order - 1)), 1]
    modes = data.draw(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=order, max_size=order))
    cores = [
        slice_major(torch.randn(r, m, n, s), i, order)
        for i, (r, (m, n), s) in enumerate(zip(bonds, modes, bonds[1:], strict=False))
    ]
    cores[k] = relaid(cores[k], tuple(data.draw(st.permutations(range(4)))))
    is_so = cores[k].as_strided((cores[k].numel(),), (1,)).tolist() == stored(cores[k], k, order)
    assert is_slice_major(cores[k], k, order) == is_so
    plan = plan_lookup([torch.tensor([0])], [[m for m, _ in modes]])
    arguments = (cores, [], list(plan), torch.tensor([0, 1]), None, False, [0], 1, 1, [], [])
    if is_so:
        torch.ops.comera_rec.pool(*arguments)
    else:
        with pytest.raises(ValueError, match=rf"cores\[{k}\] is not a slice-major tensor on CPU: see slice_major"):
            torch.ops.comera_rec.pool(*arguments)


def test_gaps_between_slices_are_detected() -> None:
    core = slice_major(torch.randn(3, 8, 2, 4), 0, 2)
    assert not is_slice_major(core[:, ::2], 0, 2)
    assert not is_slice_major(core[..., :3], 0, 2)
    assert is_slice_major(core[:, 2:5], 0, 2)


def are_slice_major(table: cr.TTEmbeddingBag) -> bool:
    return all(is_slice_major(core, k, table.shape.order) for k, core in enumerate(table.cores()))


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_tables_keep_their_cores_slice_major(order: int) -> None:
    shape = TTShape((5, 4, 3, 2)[:order], (2, 3, 2, 2)[:order], (3, 4, 2)[: order - 1])

    def build(**arguments: object) -> cr.TTEmbeddingBag:
        return cr.TTEmbeddingBag(shape.num_rows, shape.num_cols, shape=shape, **arguments)  # type: ignore[arg-type]

    table = build()
    assert are_slice_major(table)
    for again in (copy.deepcopy(table), pickle.loads(pickle.dumps(table))):
        assert are_slice_major(again)
        assert all(map(torch.equal, again.parameters(), table.parameters()))
        assert again.core_0.data_ptr() != table.core_0.data_ptr()
    assert are_slice_major(copy.deepcopy(table).bfloat16())
    assert are_slice_major(build(device="meta").to_empty(device="cpu"))
    assert are_slice_major(cr.TTEmbeddingBag.from_dense(table.to_dense(), shape=shape))
    file = io.BytesIO()
    torch.save(table.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    for values in (state, {name: value.contiguous() for name, value in state.items()}):
        loaded = build()
        loaded.load_state_dict(values)
        assert are_slice_major(loaded)
        assert all(map(torch.equal, loaded.parameters(), table.parameters()))
