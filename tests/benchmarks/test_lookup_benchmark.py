"""The lookup benchmark: agreement, the storage that dense providers share, providers left out, and memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.harness.agreement import Disagreement, require_agreement
from benchmarks.harness.ids import draw_ids
from benchmarks.harness.measure import Settings, measure_case
from benchmarks.harness.rows import Row
from benchmarks.harness.timing import Plan
from benchmarks.lookup import tables as lookup
from benchmarks.lookup.rivals import RowWiseAdagrad, shared_storage
from benchmarks.lookup.tables import (
    DENSE,
    FBGEMM,
    NO_DEDUP,
    ON_CPU,
    OURS,
    ROW_DEDUP,
    STEPS,
    TT,
    UPDATED,
    LookupCase,
    LookupWorkload,
)

FEW = Settings(plan=Plan(warmup=1, min_rounds=2, max_rounds=2), memory=False)
EAGER = [name for name, (optimizer, is_graph) in STEPS.items() if optimizer == "Adagrad" and not is_graph]
SMALL = LookupCase(rows=(1009, 53), dim=8, order=3, rank=4, batch=16, bag=3, providers=(*ON_CPU, TT, *EAGER))


def measured(case: LookupCase) -> list[Row]:
    return measure_case("lookup", case, LookupWorkload, FEW)


@pytest.mark.parametrize("order", [2, 3, 4])
@pytest.mark.parametrize("bag", [1, 3])
def test_all_providers_agree(order: int, bag: int) -> None:
    rows = measured(replace(SMALL, order=order, bag=bag))
    assert [row.provider for row in rows if row.pass_ == "step"] == [DENSE, FBGEMM, NO_DEDUP, ROW_DEDUP, OURS, UPDATED, *EAGER]
    assert (FBGEMM, "forward+backward") not in {(row.provider, row.pass_) for row in rows}


@pytest.mark.parametrize("provider", [DENSE, FBGEMM])
def test_one_wrong_row_of_a_dense_table_is_caught(provider: str) -> None:
    class OneWrong(LookupWorkload):
        def _tables(self) -> list[torch.Tensor]:
            tables = super()._tables()
            tables[1][self.batches[0].unique_ids[1][-1]] *= 1.01
            return tables

    with pytest.raises(Disagreement, match=f"{provider}: output is off"):
        measure_case("lookup", replace(SMALL, providers=(provider, OURS)), OneWrong, FEW)


@pytest.mark.parametrize("provider", [NO_DEDUP, ROW_DEDUP, OURS, TT])
def test_a_wrong_slice_of_a_core_is_caught(provider: str) -> None:
    workload = LookupWorkload(SMALL, "cpu", 0)
    made = workload.providers[provider]()
    wrong = next(p for name, p in made.module.named_parameters() if name.endswith("t1.core_1"))
    with torch.no_grad():
        wrong *= 1.001
    with pytest.raises(Disagreement, match="is off by"):
        require_agreement(workload.reference(), {provider: made.verify()})


def test_dense_providers_train_the_same_rows_step_after_step() -> None:
    workload = LookupWorkload(SMALL, "cpu", 0)
    rows = []
    for name in (DENSE, FBGEMM):  # the second doesn't see what the first trained
        step = workload.providers[name]().passes["step"]
        for turn in range(2 * lookup.NUM_BATCHES):
            step(turn)
        rows.append(shared_storage(SMALL.rows, SMALL.dim, "cpu").clone())
    torch.testing.assert_close(rows[0], rows[1])


def test_row_wise_adagrad_by_its_formula() -> None:
    weight = nn.Parameter(torch.zeros(3, 2))
    optimizer = RowWiseAdagrad([weight], lr=0.5, eps=0.0)
    for _ in range(2):
        weight.grad = torch.sparse_coo_tensor([[2, 0, 2]], [[1.0, 1.0], [0.0, 2.0], [0.0, 6.0]], (3, 2), check_invariants=True)
        optimizer.step()
    rows = torch.tensor([[0.0, 2.0], [0.0, 0.0], [1.0, 7.0]])
    root = torch.tensor([2.0, 1.0, 25.0]).sqrt()[:, None]  # roots of the rows' mean squares
    torch.testing.assert_close(weight.detach(), -0.5 * rows / root * (1 + 0.5**0.5))


@pytest.mark.parametrize("exponent", [0, 0.5, 1.5])
def test_ids_follow_zipfs_law(exponent: float) -> None:
    weights = torch.arange(1, 11).double() ** -exponent
    found = draw_ids(10, 100_000, exponent).bincount(minlength=10) / 100_000
    torch.testing.assert_close(found.double(), weights / weights.sum(), atol=0.01, rtol=0)
