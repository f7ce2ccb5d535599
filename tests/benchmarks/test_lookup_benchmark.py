"""The lookup benchmarks: agreement, the storage that dense providers share, providers left out, memory, and a sweep's plot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.harness.agreement import Disagreement, require_agreement
from benchmarks.harness.environment import describe
from benchmarks.harness.ids import draw_ids
from benchmarks.harness.measure import Settings, measure_case, prepare_calls
from benchmarks.harness.memory import memory_is_measurable, peak_extra_memory
from benchmarks.harness.rows import Row
from benchmarks.harness.timing import Plan
from benchmarks.lookup import criteo_tables as lookup
from benchmarks.lookup import memory as training_memory
from benchmarks.lookup import scaling
from benchmarks.lookup.batch import Batch
from benchmarks.lookup.criteo_tables import DENSE, FBGEMM, NO_DEDUP, OURS, ROW_DEDUP, UPDATED, LookupCase, LookupWorkload
from benchmarks.lookup.dense import RowWiseAdagrad, shared_storage
from benchmarks.plot import plot_rows

FEW = Settings(plan=Plan(warmup=1, min_rounds=2, max_rounds=2), memory=False)
SMALL = LookupCase(rows=(1009, 53), dim=8, order=3, rank=4, batch=16, bag=3)

needs_peak = pytest.mark.skipif(not memory_is_measurable("cpu"), reason="the peak of resident memory can't be reset on this system")


def measured(case: LookupCase, op: str = "lookup") -> list[Row]:
    return measure_case(op, case, LookupWorkload, FEW, describe("cpu"), {})


class TestGate:
    @pytest.mark.parametrize("order", [2, 3, 4])
    @pytest.mark.parametrize("bag", [1, 3])
    def test_all_providers_agree(self, order: int, bag: int) -> None:
        rows = measured(replace(SMALL, order=order, bag=bag))
        assert [row.provider for row in rows if row.pass_ == "step"] == [DENSE, FBGEMM, NO_DEDUP, ROW_DEDUP, OURS, UPDATED]
        assert (FBGEMM, "forward+backward") not in {(row.provider, row.pass_) for row in rows}
        assert {row.ratios[NO_DEDUP] for row in rows if row.provider == NO_DEDUP} == {1.0}

    @pytest.mark.parametrize("provider", [DENSE, FBGEMM])
    def test_one_wrong_row_of_a_dense_table_is_caught(self, provider: str) -> None:
        class OneWrong(LookupWorkload):
            def _tables(self) -> list[torch.Tensor]:
                tables = super()._tables()
                tables[1][self.batches[0].unique_ids[1][-1]] *= 1.01
                return tables

        with pytest.raises(Disagreement, match=f"{provider}: output is off"):
            measure_case("lookup", replace(SMALL, providers=(provider, OURS)), OneWrong, FEW, describe("cpu"), {})

    @pytest.mark.parametrize("provider", [NO_DEDUP, ROW_DEDUP, OURS])
    @pytest.mark.parametrize("core", [0, 1, 2])
    def test_a_wrong_slice_of_a_core_is_caught(self, provider: str, core: int) -> None:
        workload = LookupWorkload(SMALL, "cpu", 0)
        made = workload.providers[provider]()
        wrong = next(p for name, p in made.module.named_parameters() if name.endswith(f"t1.core_{core}"))
        with torch.no_grad():
            wrong *= 1.001
        with pytest.raises(Disagreement, match="is off by"):
            require_agreement(workload.reference(), {provider: made.verify()})


class TestDenseTables:
    def test_a_provider_does_not_see_what_the_last_one_trained(self) -> None:
        workload = LookupWorkload(replace(SMALL, providers=(DENSE, FBGEMM)), "cpu", 0)
        seen = []
        for name in (DENSE, FBGEMM, DENSE):
            provider = workload.providers[name]()
            seen.append(provider.verify())
            provider.passes["step"](0)
        for outcome in seen[1:]:
            torch.testing.assert_close(outcome["output"], seen[0]["output"])
            torch.testing.assert_close(outcome["rows after Adagrad"], seen[0]["rows after Adagrad"])

    def test_both_train_the_same_rows_step_after_step(self) -> None:
        workload = LookupWorkload(SMALL, "cpu", 0)
        rows = []
        for name in (DENSE, FBGEMM):
            step = workload.providers[name]().passes["step"]
            for turn in range(2 * lookup.NUM_BATCHES):
                step(turn)
            rows.append(shared_storage(SMALL.rows, SMALL.dim, "cpu", resident=True).clone())
        torch.testing.assert_close(rows[0], rows[1])

    def test_cases_of_one_dim_share_a_storage_and_only_one_is_kept(self) -> None:
        storage = partial(shared_storage, (5, 7), device="cpu", resident=True)
        first = storage(dim=4)
        assert storage(dim=4) is first
        second = storage(dim=8)
        assert len(second) == 12 * 8
        assert storage(dim=4) is not first

    def test_row_wise_adagrad_by_its_formula(self) -> None:
        weight = nn.Parameter(torch.zeros(3, 2))
        optimizer = RowWiseAdagrad([weight], lr=0.5, eps=0.0)
        for _ in range(2):
            weight.grad = torch.sparse_coo_tensor([[2, 0, 2]], [[1.0, 1.0], [0.0, 2.0], [0.0, 6.0]], (3, 2), check_invariants=True)
            optimizer.step()
        rows = torch.tensor([[0.0, 2.0], [0.0, 0.0], [1.0, 7.0]])
        root = torch.tensor([2.0, 1.0, 25.0]).sqrt()[:, None]  # roots of the rows' mean squares
        torch.testing.assert_close(weight.detach(), -0.5 * rows / root * (1 + 0.5**0.5))


class TestCases:
    @pytest.mark.parametrize("cases", [lookup.cases, scaling.cases])
    def test_full_cases_compress_the_large_criteo_tables_99_fold(self, cases: Callable[[bool], list[LookupCase]]) -> None:
        full = cases(False)
        assert len(set(full)) == len(full)
        assert all(case.rows == lookup.criteo_rows(case.dim) for case in full)
        assert min(case.compression for case in full) >= 99
        assert [case.dim for case in full] == sorted(case.dim for case in full)  # the dense tables are built once for each dim

    def test_no_table_is_larger_than_fbgemm_can_address(self) -> None:
        assert lookup.criteo_rows(64) == lookup.CRITEO_KAGGLE
        assert lookup.criteo_rows(128) == (8_388_608, *lookup.CRITEO_KAGGLE[1:])

    def test_compression_counts_all_tables_and_ranks(self) -> None:
        case = replace(SMALL, rows=(6, 6), dim=4, order=2, rank=2)  # modes 3x2 and 2x2, so cores of 12 and 8, and 2 ranks
        assert case.compression == 2 * 24 / (2 * 22)

    def test_nothing_is_left_out_of_the_full_cases_in_24_gib(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lookup, "MEMORY", 23 << 30)
        assert [case.left_out for case in lookup.cases(quick=False) if case.left_out] == []

    def test_a_provider_too_large_for_memory_is_left_out_with_a_message(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(lookup, "MOST_BYTES", 1000)
        monkeypatch.setattr(lookup, "MEMORY", 1000)
        assert {row.provider for row in measured(SMALL)} == {ROW_DEDUP, OURS, UPDATED}
        printed = capsys.readouterr().out
        assert f"without {NO_DEDUP}: a step would take about " in printed
        assert f"without {FBGEMM}: the tables would take " in printed

    def test_unique_rows_are_counted(self) -> None:
        rows = measured(replace(SMALL, rows=(3, 2), batch=50, zipf=0, order=2, rank=1))
        assert {row.counted["unique_ids"] for row in rows} == {5.0}


class TestBatches:
    @pytest.mark.parametrize("exponent", [0, 0.5, 1.5])
    def test_ids_follow_zipfs_law(self, exponent: float) -> None:
        weights = torch.arange(1, 11).double() ** -exponent
        found = draw_ids(10, 100_000, exponent).bincount(minlength=10) / 100_000
        torch.testing.assert_close(found.double(), weights / weights.sum(), atol=0.01, rtol=0)

    def test_every_form_of_a_batch_holds_the_same_ids(self) -> None:
        batch = Batch.draw((100, 20), bags=4, bag=3, exponent=1.05, device="cpu")
        for feature, ids in zip(batch.features.to_dict().values(), batch.ids, strict=True):
            assert torch.equal(feature.values(), ids)
            assert torch.equal(feature.offsets(), batch.offsets)


@needs_peak
class TestMemory:
    def test_the_gradient_of_a_dense_table_has_only_the_batchs_rows(self) -> None:
        case = LookupCase(rows=(4_000_000,), dim=64, order=2, batch=32_768, zipf=0, providers=(DENSE,))
        build = partial(LookupWorkload, timed=False)
        peaks = peak_extra_memory(prepare_calls, build, case, "cpu", 0, DENSE)
        assert peaks["forward"] == pytest.approx([16.0, 16.0], abs=3.0)  # the output twice: the table's and that of all tables
        assert peaks["step"][0] < 100  # a thousand if the table were counted as well

    def test_the_gradient_of_nested_products_is_never_whole(self) -> None:
        case = LookupCase(order=3, batch=16_384, providers=(OURS,))
        peaks = peak_extra_memory(prepare_calls, partial(LookupWorkload, timed=False), case, "cpu", 0, OURS)
        # The products and their gradient take 19 MiB each. With all of that at once, a backward pass would add 33 MiB to the peak.
        assert max(peaks["forward+backward"]) - max(peaks["forward"]) < 19

    def test_training_a_table_counts_cores_gradients_and_state(self) -> None:
        case = training_memory.TableCase(rows=4_000_000, dim=32, order=2, rank=64, batch=10, zipf=0)
        peaks = peak_extra_memory(training_memory.prepare_training, case, "cpu", 0)
        assert peaks["step"] == pytest.approx([3 * case.tt_shape.num_params * 4 / 2**20] * 2, rel=0.5)


class TestSweep:
    def test_the_sweeps_cross_in_one_case_and_are_plotted(self, tmp_path: Path) -> None:
        small = [replace(case, rows=(500,), dim=4, batch=case.batch // 64) for case in scaling.cases(quick=True)]
        rows = [row for case in small for row in measured(case, "lookup-scaling")]
        plot_rows(rows, tmp_path / "plot.svg")
        drawn = (tmp_path / "plot.svg").read_text()
        assert all(label in drawn for label in ("batch (ids zipf 1.05)", "unique rows (batch 16, ids uniform to skewed)", UPDATED))
