"""Runs the tests of Triton kernels in Triton's interpreter, in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")
FILES = ("test_bags_triton.py", "test_checked_programs_triton.py")


def test_kernels_in_the_interpreter() -> None:
    # Triton reads the variable on import, and other tests may have imported it already.
    files = [str(Path(__file__).with_name(name)) for name in FILES]
    arguments = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not gpu", "-k", "triton", *files]
    run = subprocess.run(arguments, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
