"""TT-SVD: exact at full rank, within Oseledets' bound below it; tolerance, padding, and matrices that are read in blocks."""

import math
import sys
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuse
from torch import Tensor

from comera_rec.training.memory import PeakMemory
from comera_rec.tt import TTShape, svd, tt_svd, tt_svd_spectra, tt_to_dense


def unfolding(weight: Tensor, shape: TTShape, k: int) -> Tensor:
    """The matrix whose rank bounds that of bond k: modes up to core k by modes after it."""
    axes = [axis for core in range(shape.order) for axis in (core, shape.order + core)]
    modes = weight.reshape(*shape.row_shape, *shape.col_shape).permute(axes)
    return modes.reshape(math.prod(shape.row_shape[:k]) * math.prod(shape.col_shape[:k]), -1)


ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 0.05}
BLOCKS = {"_WHOLE_LIMIT": 0, "_BLOCK": 20}
LIMITS = [{"_WHOLE_LIMIT": 1 << 24}, BLOCKS, {**BLOCKS, "_EXACT_LIMIT": 0}]  # whole; by the Gram matrix; by random subspaces


@settings(max_examples=150)
@given(
    data=st.data(), decay=st.sampled_from([0.0, 0.3, 1.0, 3.0]), rtol=st.sampled_from([0.0, 0.1, 0.5]), seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), limits=st.sampled_from(LIMITS),
)  # fmt: skip
def test_errors_are_those_of_ranks_and_tolerance(
    data: st.DataObject, decay: float, rtol: float, seed: int, dtype: torch.dtype, limits: dict[str, int]
) -> None:
    """Exact at full rank; at most Oseledets' bound (2011, theorem 2.2) or the tolerance, which includes the error of the ranks."""
    torch.manual_seed(seed)
    draw, order = data.draw, data.draw(st.integers(1, 4))
    modes = st.lists(st.integers(1, 4), min_size=order, max_size=order)
    shape = TTShape(draw(modes), draw(modes), draw(st.lists(st.integers(1, 20), min_size=order - 1, max_size=order - 1)))
    rows, columns = draw(st.integers(1, shape.num_rows)), draw(st.integers(1, shape.num_cols))
    whole = torch.zeros(shape.num_rows, shape.num_cols, dtype=torch.float64)
    spectrum = 10 ** (-decay * torch.arange(min(rows, columns), dtype=torch.float64))
    left, right = (torch.linalg.qr(torch.randn(size, len(spectrum), dtype=torch.float64)).Q for size in (rows, columns))
    whole[:rows, :columns] = (draw(st.sampled_from([0, 1, 100])) * (left * spectrum) @ right.mT).to(dtype)
    with patch.multiple(svd, **limits):
        cores = tt_svd(whole[:rows, :columns].to(dtype), shape, rtol=rtol)
    ranks = tuple(core.shape[-1] for core in cores[:-1])
    assert all(core.isfinite().all() and core.dtype == dtype for core in cores)
    assert ranks == shape.ranks or rtol, "ranks beyond the useful ones are kept with zeros"
    dense, norm = tt_to_dense([core.double() for core in cores], shape.with_ranks(ranks)), whole.norm()
    least = 0 if limits["_WHOLE_LIMIT"] else 1e-7  # a Gram matrix has the squares of singular values
    error, rounding = (dense - whole).norm(), max(ROUNDING[dtype], least) * norm
    values = [torch.linalg.svdvals(unfolding(whole, shape, k)) for k in range(1, order)]
    lost = torch.tensor([[each[kept:].norm() for each, kept in zip(values, of, strict=True)] for of in (shape.ranks, ranks)])
    assert error <= lost[0].clamp_min(rtol / max(1, order - 1) ** 0.5 * norm).norm() + rounding
    assert order == 1 or error >= lost[1].max() - rounding
    assert norm or not rtol or set(ranks) <= {1}
    for matrix in (core.double().flatten(0, 2) for core in cores[:-1]):  # left-orthogonal, apart from columns of zeros
        gram = matrix.mT @ matrix
        torch.testing.assert_close(gram, gram.diag().round().diag(), rtol=0, atol=10 * ROUNDING[dtype])


def decaying(row_shape: tuple[int, ...], col_shape: tuple[int, ...], size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A matrix whose first and last unfoldings have the same singular values, which fall to a tenth every 6.3; and these values."""
    spectrum = 10.0 ** (-torch.arange(size, dtype=torch.float64) / 6.3)
    first, last = row_shape[0] * col_shape[0], row_shape[-1] * col_shape[-1]
    middle = math.prod(row_shape[1:-1]) * math.prod(col_shape[1:-1])
    left, right = (torch.linalg.qr(torch.randn(rows, size, dtype=torch.float64)).Q for rows in (first, last))
    between, order = torch.full((middle,), middle**-0.5, dtype=torch.float64), len(row_shape)
    modes = torch.einsum("ar,r,m,br->amb", left, spectrum, between, right)
    modes = modes.reshape([mode for pair in zip(row_shape, col_shape, strict=True) for mode in pair])
    modes = modes.permute([*range(0, 2 * order, 2), *range(1, 2 * order, 2)])
    return modes.reshape(math.prod(row_shape), math.prod(col_shape)).to(dtype), spectrum


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("row_shape", "limits"),
    [
        *(((40, 60), limits) for limits in LIMITS),
        ((300, 320), LIMITS[0]),  # both sides of the unfolding are longer than 1024
        ((40, 5, 60), {"_EXACT_LIMIT": 100}),  # also the second unfolding: 5 times the first rank, 240
    ],
)
def test_a_small_tolerance_gives_the_smallest_ranks(row_shape: tuple[int, ...], limits: dict[str, int], dtype: torch.dtype) -> None:
    col_shape = tuple(4 if mode > 3 else 1 for mode in row_shape)
    rtol, shape = 1e-4, TTShape(row_shape, col_shape, 64)
    weight, spectrum = decaying(row_shape, col_shape, 64, dtype)
    tails = spectrum.flip(0).square().cumsum(0).sqrt().flip(0)  # errors when keeping 0, 1, ... ranks
    suffice = int((tails > rtol / (shape.order - 1) ** 0.5 * spectrum.norm()).sum())
    assert 20 < suffice < 30
    with patch.multiple(svd, **limits):
        state, cores = torch.get_rng_state(), tt_svd(weight, shape, rtol=rtol)
    assert state.equal(torch.get_rng_state()), "all processes get the same cores"
    assert {core.dtype for core in cores} == {dtype}
    assert max(core.shape[-1] for core in cores) <= suffice
    dense = tt_to_dense(cores, shape.with_ranks([core.shape[-1] for core in cores[:-1]]))
    assert float((dense - weight).norm()) <= 1.001 * rtol * float(weight.norm())


@pytest.mark.parametrize(
    ("weight", "rtol", "message"),
    [
        (torch.zeros(13, 4), 0.0, r"weight of shape \(13, 4\) does not fit modes of 12 x 4: enlarge them"),
        (torch.zeros(12), 0.0, r"weight of shape \(12,\) does not fit"),
        (torch.ones(12, 4, dtype=torch.int64), 0.0, r"weight is torch.int64: give a matrix of floating point"),
        (torch.full((12, 4), math.nan), 0.0, r"weight holds numbers that are not finite"),
        (torch.zeros(12, 4), -0.1, r"rtol is -0.1: give a non-negative number"),
        (torch.zeros(12, 4), math.nan, r"rtol is nan: give a non-negative number"),
    ],
)
def test_tt_svd_names_what_is_wrong(weight: Tensor, rtol: float, message: str) -> None:
    refuse(message, tt_svd, weight, TTShape((3, 4), (2, 2), 2), rtol=rtol)


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("columns", [13, 16])
def test_errors_of_important_rows_weigh_more(limits: dict[str, int], columns: int) -> None:
    """At order 2 the optimum is known: that of the matrix with scaled rows."""
    shape = TTShape((40, 30), (4, 4), 8)
    weight = torch.randn(1190, columns)  # the last leading digit has fewer rows
    importance = torch.logspace(0, -6, 1190)
    importance[600:900] = 0
    means = torch.nn.functional.pad(importance, (0, 10)).view(40, 30).mean(1)
    scale = means.clamp_min(1e-3 * means.mean()).sqrt().repeat_interleave(30)[:1190, None]
    best, expected = tt_svd_spectra(scale * weight, shape)
    with patch.multiple(svd, **limits):
        cores, spectra = tt_svd_spectra(weight, shape, importance=importance)
    torch.testing.assert_close(spectra[0], expected[0], rtol=0.02, atol=0)
    error = (scale * (tt_to_dense(cores, shape)[:1190, :columns] - weight)).norm()
    least = (tt_to_dense(best, shape)[:1190, :columns] - scale * weight).norm()
    assert error <= 1.02 * least
    assert error < 0.9 * (scale * (tt_to_dense(tt_svd(weight, shape), shape)[:1190, :columns] - weight)).norm()
    tiny, of_tiny = tt_svd_spectra(weight.half(), shape, importance=1e-11 * importance.double())
    difference = tt_to_dense([core.float() for core in tiny], shape) - tt_to_dense(cores, shape)
    assert difference.norm() < 0.02 * weight.norm(), "a mean loss's squared gradients are tiny"
    torch.testing.assert_close(of_tiny[0], 1e-11**0.5 * spectra[0], rtol=0.01, atol=0)
    alike, _ = tt_svd_spectra(weight, shape, importance=torch.zeros(1190))
    torch.testing.assert_close(tt_to_dense(alike, shape), tt_to_dense(tt_svd(weight, shape), shape), rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(sys.platform != "linux", reason="peaks of memory are read on Linux only")
def test_memory_besides_the_matrix_is_that_of_blocks() -> None:
    weight, shape = torch.randn(300_000, 64), TTShape.for_table(300_000, 64, tt_ranks=16, order=3)
    with patch.multiple(svd, _WHOLE_LIMIT=1 << 20, _BLOCK=1 << 18):
        tt_svd(weight[:30_000], TTShape.for_table(30_000, 64, tt_ranks=16, order=3))  # what libraries keep is there from then on
        memory = PeakMemory(torch.device("cpu"))
        tt_svd(weight, shape)
    # Blocks take 14 to 131 MiB, however large the matrix is, which would take 193 as a whole.
    assert memory.highest < 150
