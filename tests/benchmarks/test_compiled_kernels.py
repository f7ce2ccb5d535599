"""The Triton kernels compiled for GPUs that aren't present: nothing spills, and resources stay within bounds."""

from __future__ import annotations

import os
from typing import NamedTuple

import pytest

pytest.importorskip("triton", reason="triton is not installed: pip install triton (Linux)")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from benchmarks.gpu.compiled import compile_for_amd, compile_launch
from benchmarks.gpu.kernels import Call, calls

CALLS = calls()


class Bounds(NamedTuple):
    """The resources that a kernel may use on any architecture, and the occupancy and density that it must reach."""

    registers: int
    shared: int
    """Bytes."""
    occupancy: float
    """Smallest share of a multiprocessor's warps."""
    inner: float = 0.0
    """Smallest share of multiply-adds among the instructions of any innermost loop that has some."""


# What Triton 3.9 needs for sm_80, sm_90 and sm_100, with room for other versions.
BOUNDS = {
    "plan 7": Bounds(64, 1024, 0.45),
    "pool 8x8x8": Bounds(80, 0, 0.35, 0.5),
    "pool 4x16x16": Bounds(80, 0, 0.35, 0.5),
    "pool 8x16x16": Bounds(80, 0, 0.35, 0.5),
    "gradient of weights 8x8x8": Bounds(72, 0, 0.4, 0.5),
    "gradient of weights 4x16x16": Bounds(72, 0, 0.4, 0.5),
    "gradient of weights 8x16x16": Bounds(72, 0, 0.4, 0.5),
    "gradient of slices 8x8x8": Bounds(104, 1024, 0.25, 0.5),
    "gradient of slices 8x16x8": Bounds(104, 1024, 0.25, 0.5),
    "gradient of slices 8x32x8": Bounds(104, 1024, 0.25, 0.5),
    "gradient of slices 4x16x16": Bounds(112, 1024, 0.25, 0.5),
    "gradient of slices 8x16x16": Bounds(112, 1024, 0.25, 0.5),
    "parts of slices": Bounds(96, 1024, 0.3),
    "groups of parts": Bounds(72, 4096, 0.4),
    "update of slices 8x8": Bounds(80, 1024, 0.35),
    "update of slices 4x16": Bounds(80, 1024, 0.35),
    "update of slices 8x16": Bounds(80, 1024, 0.35),
    "update of diagonals": Bounds(136, 1024, 0.2),
    "update of slices, bfloat16 8x8": Bounds(96, 1024, 0.3),
    "update of diagonals, bfloat16": Bounds(136, 1024, 0.2),
}


@pytest.mark.parametrize(
    ("call", "architecture"),
    [pytest.param(call, arch, id=f"{call}, sm_{arch}") for call in CALLS for arch in (80, 90, 100) if call.in_all or arch == 90],
)
def test_kernels_stay_within_their_bounds(call: Call, architecture: int) -> None:
    compiled = compile_launch(call.launch, call.tensors, architecture)
    bounds = BOUNDS[str(call)]
    assert compiled.spilled == 0
    assert compiled.registers <= bounds.registers
    assert compiled.shared <= bounds.shared
    assert compiled.occupancy >= bounds.occupancy
    if bounds.inner:
        assert compiled.loops
        assert all(loop.products >= bounds.inner * loop.size for loop in compiled.loops), compiled.loops


@pytest.mark.parametrize("call", [call for call in CALLS if call.what in ("update of diagonals", "groups of parts")], ids=str)
def test_what_all_warps_read_is_replaced_after_a_barrier(call: Call) -> None:
    # More threads than numbers: several read each, but only one of them writes it.
    accesses = [name[:3] for name in compile_launch(call.launch, call.tensors, 90).names if name.startswith(("LDG", "STG", "BAR"))]
    assert accesses[: accesses.index("STG")][-1] == "BAR"


@pytest.mark.parametrize("call", [call for call in CALLS if call.what in ("pool", "gradient of slices")][-2:], ids=str)
def test_kernels_compile_for_amd(call: Call) -> None:
    assert ".vgpr_spill_count: 0" in compile_for_amd(call.launch, call.tensors)
