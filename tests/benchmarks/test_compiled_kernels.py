"""The Triton kernels compiled for GPUs that aren't present: nothing spills, and barriers are kept."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: pip install triton (Linux)")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from benchmarks.gpu.launches import count_step
from benchmarks.gpu.static import compile_for_amd, compile_launch, step_kernels
from comera_rec.tt import TTShape

OF_STEPS = [
    *({"dim": 64, "rank": 16, "architecture": architecture} for architecture in (80, 90, 100)),
    *({"dim": dim, "rank": rank, "architecture": 90} for dim, rank in ((64, 8), (64, 32), (128, 16), (128, 32))),
    {"dim": 64, "rank": 16, "architecture": 90, "weighted": True},
    {"dim": 64, "rank": 16, "architecture": 90, "dtype": torch.bfloat16},
    {"dim": 64, "rank": 16, "architecture": 90, "hot_rows": ((1000, 8), (2000, 4))},
]


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
