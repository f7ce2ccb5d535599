"""The Triton kernels compiled for GPUs that aren't present: nothing spills, and resources stay within bounds."""

from __future__ import annotations

import os
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: pip install triton (Linux)")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from benchmarks.gpu.launches import count_step
from benchmarks.gpu.static import cases, compile_for_amd, compile_launch, step_kernels
from comera_rec.tt import TTShape


class Bounds(NamedTuple):
    """The registers and bytes of shared memory that a kernel may use, and the least share of multiply-adds in inner loops."""

    registers: int
    shared: int
    inner: float = 0.0


# What Triton 3.9 needs for sm_80, sm_90 and sm_100, with room for other versions.
BOUNDS = {
    "split ids": Bounds(64, 1024),
    "find blocks": Bounds(64, 1024),
    "pool": Bounds(80, 0, 0.5),
    "weight gradients": Bounds(72, 0, 0.5),
    "sum slices": Bounds(120, 1024, 0.5),
    "sum parts": Bounds(96, 1024),
    "sum parts of groups": Bounds(72, 4096),
    "finish slices": Bounds(96, 1024),
    "finish diagonals": Bounds(136, 1024),
}
OF_STEPS = [
    *(
        {"dim": case.dim, "rank": case.rank, "architecture": case.architecture}
        for case in cases(quick=False)
        if case.architecture == 90 or (case.dim, case.rank) == (64, 16)
    ),
    {"dim": 64, "rank": 16, "architecture": 90, "weighted": True},
    {"dim": 64, "rank": 16, "architecture": 90, "dtype": torch.bfloat16},
    {"dim": 64, "rank": 16, "architecture": 90, "hot_rows": ((1000, 8),)},
]


@pytest.mark.parametrize("step", OF_STEPS, ids=lambda step: " ".join(map(str, step.values())))
def test_kernels_stay_within_their_bounds(step: dict) -> None:
    options = dict(step)
    architecture = options.pop("architecture")
    kernels = step_kernels(**options)
    assert len(kernels) >= 7
    for name, (launch, tensors) in kernels.items():
        compiled, bounds = compile_launch(launch, tensors, architecture), BOUNDS[name]
        assert compiled.spilled == 0, name
        assert compiled.registers <= bounds.registers, name
        assert compiled.shared <= bounds.shared * (2 if "hot_rows" in step else 1), name  # blocks have wider rows
        if bounds.inner and not {"dtype", "hot_rows"} & step.keys():
            assert compiled.loops, name
            assert all(loop.multiply_adds >= bounds.inner * loop.instructions for loop in compiled.loops), (name, compiled.loops)


def test_slices_and_gradients_are_loaded_16_bytes_at_once() -> None:
    # Both sides of two columns of four: 4 of either operand. Triton 3.6 loads single numbers if a mask varies within the 16 bytes.
    names = compile_launch(*step_kernels(64, 16)["sum slices"], 90).names
    assert sum(name.startswith("LDG.E.128") for name in names) == 32


@pytest.mark.parametrize("cols", [(2, 3), (4, 6), (7, 1), (33, 2)], ids=str)
def test_kernels_compile_for_any_size(cols: tuple[int, int]) -> None:
    # The interpreter runs only the branch that a constant selects; the compiler also checks what follows it.
    for launch, tensors in count_step([TTShape((3, 2), cols, (5,))], 8).launches:
        compile_launch(launch, tensors, 90)


@pytest.mark.parametrize("name", ["finish diagonals", "sum parts of groups"])
def test_what_all_warps_read_is_replaced_after_a_barrier(name: str) -> None:
    # More threads than numbers: several read each, but only one of them writes it.
    names = compile_launch(*step_kernels(64, 16)[name], 90).names
    accesses = [access[:3] for access in names if access.startswith(("LDG", "STG", "BAR"))]
    assert accesses[: accesses.index("STG")][-1] == "BAR"


@pytest.mark.parametrize("name", ["pool", "sum slices"])
def test_kernels_compile_for_amd(name: str) -> None:
    assert ".vgpr_spill_count: 0" in compile_for_amd(*step_kernels(128, 16)[name])
