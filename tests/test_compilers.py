"""The compiled code is valid for other compilers than the one that built it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from hatch_build import operator_units, pipeline_units

ROOT = Path(__file__).parents[1]
CANDIDATES = (*(f"clang++-{version}" for version in range(30, 15, -1)), "clang++")
CLANG = next(filter(None, map(shutil.which, CANDIDATES)), None)


@pytest.mark.skipif(CLANG is None, reason="clang++ is not installed")
def test_clang_accepts_every_unit() -> None:
    version = subprocess.run([CLANG, "-dumpversion"], capture_output=True, text=True, check=True).stdout
    if int(version.split(".")[0]) < 16:
        pytest.skip(f"clang++ {version.strip()} is older than 16, the oldest with _Float16 on every x86-64")
    for path, name, flags in (*operator_units(ROOT), *pipeline_units(ROOT)):
        done = subprocess.run([CLANG, *flags, "-Werror", "-fsyntax-only", str(path)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{name}: {done.stderr}"
