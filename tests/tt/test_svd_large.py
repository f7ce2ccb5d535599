"""TT-SVD of matrices that are read in blocks: the same matrix, and memory that doesn't grow with it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from comera_rec.tt import TTShape, svd, tt_svd, tt_svd_spectra, tt_to_dense


@pytest.mark.parametrize("order", [2, 3, 4])
@pytest.mark.parametrize("size", [(997, 13), (1200, 16)])
def test_blocks_give_the_same_as_the_whole(order: int, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    rows, columns = size
    shape = TTShape.for_table(rows, columns, tt_ranks=6, order=order)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(rows, 6, generator=generator) @ torch.randn(6, columns, generator=generator)
    exact, spectra = tt_svd_spectra(weight, shape)
    monkeypatch.setattr(svd, "_WHOLE_LIMIT", 100)
    monkeypatch.setattr(svd, "_BLOCK", 777)
    for limit in (1, 1024):  # randomized basis, and basis from the Gram matrix
        monkeypatch.setattr(svd, "_EXACT_LIMIT", limit)
        actual, actual_spectra = tt_svd_spectra(weight, shape)
        assert [core.shape for core in actual] == [core.shape for core in exact]
        torch.testing.assert_close(actual_spectra[0], spectra[0], rtol=0.02, atol=1e-3)
        errors = [(tt_to_dense(cores, shape)[:rows, :columns] - weight).norm() for cores in (actual, exact)]
        assert errors[0] <= 1.02 * errors[1] + 1e-3 * weight.norm()
        for core in (*actual[:-1], *exact[:-1]):
            matrix = core.flatten(0, 2)
            torch.testing.assert_close(matrix.mT @ matrix, torch.eye(matrix.shape[1]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("columns", [13, 16])
def test_errors_of_important_rows_weigh_more(blocks: bool, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At order 2 the optimum is known: that of the matrix with scaled rows."""
    shape = TTShape((40, 30), (4, 4), 8)
    weight = torch.randn(1190, columns)  # the last leading digit has fewer rows
    importance = torch.logspace(0, -6, 1190)
    importance[600:900] = 0
    means = torch.nn.functional.pad(importance, (0, 10)).view(40, 30).mean(1)
    scale = means.clamp_min(1e-3 * means.mean()).sqrt().repeat_interleave(30)[:1190, None]
    best, expected = tt_svd_spectra(scale * weight, shape)
    if blocks:
        monkeypatch.setattr(svd, "_WHOLE_LIMIT", 100)
        monkeypatch.setattr(svd, "_BLOCK", 777)
    cores, spectra = tt_svd_spectra(weight, shape, importance=importance)
    torch.testing.assert_close(spectra[0], expected[0], rtol=0.02, atol=0)
    error = (scale * (tt_to_dense(cores, shape)[:1190, :columns] - weight)).norm()
    least = (tt_to_dense(best, shape)[:1190, :columns] - scale * weight).norm()
    assert error <= 1.02 * least
    assert error < 0.9 * (scale * (tt_to_dense(tt_svd(weight, shape), shape)[:1190, :columns] - weight)).norm()
    alike, _ = tt_svd_spectra(weight, shape, importance=torch.zeros(1190))
    torch.testing.assert_close(tt_to_dense(alike, shape), tt_to_dense(tt_svd(weight, shape), shape), rtol=1e-3, atol=1e-3)


_CHILD = """
import resource, torch
from comera_rec.tt import TTShape, svd, tt_svd
torch.set_num_threads(1)
svd._WHOLE_LIMIT, svd._BLOCK = 1 << 20, 1 << 18
weight = torch.randn(300_000, 64)
torch.linalg.qr(torch.randn(8, 8)), torch.linalg.eigh(torch.eye(8))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tt_svd(weight, TTShape.for_table(300_000, 64, tt_ranks=16, order=3))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux only")
def test_memory_besides_the_matrix_is_that_of_blocks() -> None:
    # The matrix takes 73 MiB. Blocks and libraries take 30 to 80 MiB, however large it is; copies would take 300.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}  # otherwise glibc keeps a varying number of freed blocks
    done = subprocess.run([sys.executable, "-c", _CHILD], capture_output=True, text=True, check=True, env=environment)
    assert float(done.stdout) < 150
