"""The Triton kernels compiled for GPUs that aren't here: nothing spills, and what they take stays within bounds."""

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
    """What a kernel may take on any architecture, and what it must reach."""

    registers: int
    shared: int
    """Bytes."""
    occupancy: float
    """Of a multiprocessor's warps."""
    inner: float = 0.0
    """Multiply-adds among the instructions of the inner loop."""


# As Triton 3.9 compiles them for sm_80, sm_90 and sm_100, with room for other versions.
BOUNDS = {
    "multiply 8x8x8": Bounds(64, 4096, 0.6, 0.5),
    "multiply 8x16x8": Bounds(72, 16384, 0.25, 0.7),
    "multiply 8x32x8": Bounds(104, 16384, 0.25, 0.7),
    "multiply 4x16x16": Bounds(72, 20480, 0.25, 0.7),
    "multiply 8x16x16": Bounds(72, 12288, 0.4, 0.7),
    "pool 64": Bounds(96, 0, 0.3),
    "pool 128": Bounds(96, 0, 0.3),
    "gradient of rows 64": Bounds(72, 12288, 0.45, 0.8),
    "gradient of rows 128": Bounds(72, 12288, 0.45, 0.8),
    "gradient of first core 8x8x8": Bounds(80, 2048, 0.35, 0.5),
    "gradient of first core 8x16x8": Bounds(128, 3072, 0.25, 0.5),
    "gradient of first core 8x32x8": Bounds(200, 5120, 0.15, 0.5),
    "gradient of first core 4x16x16": Bounds(128, 2560, 0.25, 0.5),
    "gradient of first core 8x16x16": Bounds(128, 3072, 0.25, 0.5),
    "gradient of last core 8x8x8": Bounds(80, 2048, 0.35, 0.4),
    "gradient of last core 8x16x8": Bounds(128, 3072, 0.25, 0.5),
    "gradient of last core 8x32x8": Bounds(184, 5120, 0.15, 0.5),
    "gradient of last core 4x16x16": Bounds(80, 4096, 0.35, 0.5),
    "gradient of last core 8x16x16": Bounds(80, 4096, 0.35, 0.5),
    "parts": Bounds(64, 1024, 0.45),
}


@pytest.mark.parametrize(
    ("call", "architecture"),
    [pytest.param(call, arch, id=f"{call}, sm_{arch}") for call in CALLS for arch in (80, 90, 100) if call.in_all or arch == 90],
)
def test_kernels_stay_within_their_bounds(call: Call, architecture: int) -> None:
    compiled = compile_launch(call.launch, call.tensors, architecture)
    bounds = BOUNDS["parts" if call.what.startswith("parts") else str(call)]
    assert compiled.spilled == 0
    assert compiled.registers <= bounds.registers
    assert compiled.shared <= bounds.shared
    assert compiled.occupancy >= bounds.occupancy
    if bounds.inner:
        products, instructions = compiled.inner
        assert products >= bounds.inner * instructions, f"{products} multiply-adds of {instructions} instructions"
    else:
        assert compiled.kinds["multiply-add"] == 0


@pytest.mark.parametrize("call", [call for call in CALLS if call.what in ("multiply", "pool")][-2:], ids=str)
def test_kernels_compile_for_amd(call: Call) -> None:
    assert ".vgpr_spill_count: 0" in compile_for_amd(call.launch, call.tensors)
