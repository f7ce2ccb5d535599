"""Runs the tests of Triton kernels in Triton's interpreter; programs that race, overrun or misstate alignments fail there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterError

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
in_the_interpreter = pytest.mark.skipif(not INTERPRETED, reason="test_kernels_in_the_interpreter runs it in a process of its own")


@pytest.mark.skipif(INTERPRETED, reason="this is the process that it starts")
def test_kernels_in_the_interpreter() -> None:
    # Triton reads the variable on import, and other tests may have imported it already.
    files = [__file__, str(Path(__file__).with_name("test_bags_triton.py"))]
    arguments = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not gpu", "-k", "triton", *files]
    run = subprocess.run(arguments, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@triton.jit
def _add_neighbors(x_ptr, FROM: tl.constexpr, TO: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """Program p adds its block and the one `FROM` programs later, and writes the sum `TO` programs later."""
    block = x_ptr + tl.arange(0, BLOCK)
    p = tl.program_id(0)
    total = tl.load(block + p * BLOCK) + tl.load(block + (p + FROM) * BLOCK)
    tl.store(tl.multiple_of(block + (p + TO) * BLOCK, 4), total)


@in_the_interpreter
@pytest.mark.parametrize(("reads", "writes"), [(1, 0), (0, 1)])
def test_programs_that_touch_what_another_writes_fail(reads: int, writes: int) -> None:
    with pytest.raises(AssertionError, match="touch the same byte"):
        _add_neighbors[(3,)](torch.zeros(4, 8), FROM=reads, TO=writes, BLOCK=8)


@in_the_interpreter
@pytest.mark.parametrize(("reads", "writes"), [(3, 0), (0, 3), (-1, 0)])
def test_programs_that_leave_their_tensors_fail(reads: int, writes: int) -> None:
    with pytest.raises(InterpreterError, match="beyond all tensors"):
        _add_neighbors[(3,)](torch.zeros(5, 8), FROM=reads, TO=writes, BLOCK=8)


@in_the_interpreter
def test_false_claims_of_alignment_fail() -> None:
    x = torch.zeros(4, 8)
    _add_neighbors[(4,)](x, FROM=0, TO=0, BLOCK=8)
    with pytest.raises(InterpreterError, match="multiples of"):
        _add_neighbors[(4,)](x.half(), FROM=0, TO=0, BLOCK=8)
