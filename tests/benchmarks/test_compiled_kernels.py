"""What a step launches on a GPU, without one: it never waits; compiled kernels are few, spill nothing, and keep barriers."""

import itertools
import os
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: pip install triton (Linux)")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from benchmarks.gpu.launches import Step, count_step
from benchmarks.gpu.static import compile_for_amd, compile_launch, step_kernels
from comera_rec.ops.plan import pairs, reference
from comera_rec.tt import TTShape

OF_STEPS = [
    *({"dim": 64, "rank": 16, "architecture": architecture} for architecture in (80, 90, 100)),
    *({"dim": dim, "rank": rank, "architecture": 90} for dim, rank in ((64, 8), (64, 32), (128, 16), (128, 32))),
    {"dim": 64, "rank": 16, "architecture": 90, "weighted": True},
    {"dim": 64, "rank": 16, "architecture": 90, "dtype": torch.bfloat16},
    {"dim": 64, "rank": 16, "architecture": 90, "hot_rows": ((1000, 8), (2000, 4))},
    {"dim": 64, "rank": 16, "architecture": 90, "order": 4},
]
ROWS = {2: (40, 50), 3: (12, 10, 12), 4: (6, 6, 6, 6)}
COLS = {2: (4, 4), 3: (4, 2, 2), 4: (2, 2, 2, 2)}
WAIT = {"_local_scalar_dense", "item", "nonzero", "unique", "_unique2", "masked_select", "lift_fresh_copy"}


@pytest.mark.parametrize("step", OF_STEPS, ids=lambda step: " ".join(map(str, step.values())))
def test_no_kernel_spills_registers(step: dict) -> None:
    options = dict(step)
    architecture = options.pop("architecture")
    for name, launch in step_kernels(**options).items():
        assert compile_launch(launch, architecture).spilled == 0, name


@pytest.mark.parametrize("cols", [(2, 3), (4, 6), (7, 1), (33, 2)], ids=str)
def test_kernels_compile_for_any_size(cols: tuple[int, int]) -> None:
    # The interpreter runs only the branch that a constant selects; the compiler also checks what follows it.
    for launch in count_step([TTShape((3, 2), cols, (5,))], 8).launches:
        compile_launch(launch, 90)


@pytest.mark.parametrize("name", ["finish diagonals", "sum parts of groups"])
def test_what_all_warps_read_is_replaced_after_a_barrier(name: str) -> None:
    # More threads than numbers: several read each, but only one of them writes it.
    names = compile_launch(step_kernels(64, 16)[name], 90).names
    accesses = [access[:3] for access in names if access.startswith(("LDG", "STG", "BAR"))]
    assert accesses[: accesses.index("STG")][-1] == "BAR"


@pytest.mark.parametrize("name", ["pool", "sum slices"])
def test_kernels_compile_for_amd(name: str) -> None:
    assert ".vgpr_spill_count: 0" in compile_for_amd(step_kernels(128, 16)[name])


def step(order: int, rank: int) -> Step:
    """Count a step of a table; one of order 2 is updated in backward."""
    return count_step([TTShape(ROWS[order], COLS[order], rank)], 64, optimizer="Adagrad" if order == 2 else "Adam")


@pytest.mark.parametrize("order", ROWS)
def test_nothing_waits_and_no_size_depends_on_the_values_of_ids(order: int) -> None:
    # Fake tensors have no values, so waiting would have raised. Copies from the host would also break a capture.
    assert not {name for name, _ in step(order, 8).torch} & WAIT


@pytest.mark.parametrize("tables", [1, 3])
@pytest.mark.parametrize(("order", "optimizer", "kernels"), [(2, "Adagrad", 13), (2, "Adam", 17), (3, "Adam", 27), (4, "Adam", 36)])
def test_the_number_of_kernels_depends_on_neither_tables_nor_batches(order: int, optimizer: str, kernels: int, tables: int) -> None:
    shapes = [TTShape(ROWS[order], COLS[order], 8)] * tables
    for batch in (16_384, 65_536):
        assert count_step(shapes, batch, optimizer=optimizer).kernels == kernels
    if optimizer == "Adagrad":
        assert count_step(shapes, 16_384, hot_rows=((4, 2),)).kernels == kernels + 14


def test_a_truncation_recompiles_at_most_one_kernel() -> None:
    before = {launch.kernel.variant for launch in step(2, 40).launches}
    for rank in (37, 20, 15, 9, 3):
        variants = {launch.kernel.variant for launch in step(2, rank).launches}
        assert len(variants - before) <= 1, f"at rank {rank}"
        before |= variants
    assert not {launch.kernel.variant for launch in step(2, 1).launches} - before


@pytest.mark.parametrize("lengths", [(3, 3), (4,), (3, 5)], ids=str)
def test_a_capture_copies_no_starts_of_tables_from_the_host(lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    capturing, device = [False], torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(pairs.torch, "arange", lambda count, device: torch.ones(count).cumsum(0) - 1)
    monkeypatch.setattr(Tensor, "to", lambda tensor, *_, **__: tensor)
    try:
        expected = pairs._starts(lengths, device).tolist()
        capturing[0] = True
        monkeypatch.setattr(pairs.torch, "tensor", lambda *_, **__: pytest.fail("copied from the host during a capture"))
        assert pairs._starts(lengths, device).tolist() == expected == [0, *itertools.accumulate(lengths)]
    finally:
        pairs._kept_starts.cache_clear()
        reference._CAPTURED.clear()


def test_constants_of_captured_graphs_stay_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    # A captured graph reads them at their old addresses, so none may be recreated; others may not pile up.
    capturing = [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(reference.torch, "tensor", lambda rows, device: SimpleNamespace(device=device))
    device = torch.device("cuda")
    captured = reference.on_device([[1, 2]], device)
    capturing[0] = False
    for number in range(10_000):
        reference.on_device([[number]], device)
    assert reference.on_device([[1, 2]], device) is captured
    capturing[0] = True
    monkeypatch.setattr(reference.torch, "tensor", lambda *_, **__: pytest.fail("copied from the host during a capture"))
    assert reference.on_device([[1, 2]], device) is captured
    assert reference._cached.cache_info().currsize < 5000
    reference._cached.cache_clear()
    reference._CAPTURED.clear()
