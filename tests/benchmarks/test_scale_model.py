"""The paper model of a step on many GPUs: its parts equal those computed by hand, its bytes those counted on processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.harness.measure import Settings
from benchmarks.sharding.scale_model import (
    ATTAINED,
    NETWORK,
    NVLINK,
    PROVIDERS,
    ScaleCase,
    all_reduce_seconds,
    exchange_seconds,
    run,
    step,
)

SMALL = ScaleCase(gpus=64, batch=1024)
BAGS, GRADIENTS = "ids and bags ms", "gradients of trains and small tables ms"


def test_an_exchange_inside_a_node_takes_nvlink_and_across_nodes_the_network() -> None:
    assert exchange_seconds(1e9, 8) == pytest.approx(1e9 / NVLINK / ATTAINED)
    assert exchange_seconds(1e9, 64) == pytest.approx(1e9 * 56 / 63 / NETWORK / ATTAINED)


def test_an_all_reduce_between_nodes_moves_an_eighth_for_each_gpu() -> None:
    size = 8e8
    in_node = all_reduce_seconds(2 * 7 / 8 * size, 8)
    assert in_node == pytest.approx(2 * 7 / 8 * size / NVLINK / ATTAINED)
    two_nodes = all_reduce_seconds(2 * 15 / 16 * size, 16)
    assert two_nodes - in_node == pytest.approx(2 * 1 / 2 * (size / 8) / NETWORK / ATTAINED)


def test_copies_move_the_same_whatever_the_batch_and_bags_in_proportion() -> None:
    larger = replace(SMALL, batch=16 * SMALL.batch)
    assert step(larger, "TT data-parallel")[GRADIENTS] == step(SMALL, "TT data-parallel")[GRADIENTS] > 0
    assert step(larger, "TT data-parallel")[BAGS] == 0
    assert step(larger, "dense table-wise")["sent MiB"] == pytest.approx(16 * step(SMALL, "dense table-wise")["sent MiB"])


def test_tables_have_the_size_of_their_compression() -> None:
    rows = 187_767_399  # MLPerf's
    dense = step(replace(SMALL, gpus=8), "dense table-wise")["tables MiB"]
    assert dense == pytest.approx(rows * 129 * 4 / 8 / 2**20)
    tables = step(SMALL, "TT data-parallel")["tables MiB"]  # weights, gradients and optimizer state
    assert tables <= 3 * rows * 128 * 4 / SMALL.compression / 2**20
    assert tables > 0.9 * 3 * rows * 128 * 4 / SMALL.compression / 2**20


def test_rows_have_the_sum_of_their_parts() -> None:
    rows = [row for case in run(Settings(quick=True)) for row in case]
    assert [row.provider for row in rows] == list(PROVIDERS)
    for row in rows:
        assert row.p50 == pytest.approx(sum(value for part, value in row.counted.items() if part.endswith(" ms")))
        assert "nothing measured" in row.machine
