"""The library works without optional packages, naming the extra to install, and its compiled code suits other compilers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from data_pipeline.errors import EXTRAS
from hatch_build import operator_units, pipeline_units

ROOT = Path(__file__).parents[1]
OF_TORCH = {"filelock", "fsspec", "jinja2", "tqdm"}  # torch and TorchRec require these themselves
HIDDEN = {module for modules in EXTRAS.values() for module in modules} - OF_TORCH | {"dask", "onnx", "pandas", "triton"}
HIDE = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *others: None if name.partition(".")[0] in {hidden} else find(name, *others)
"""


def run_without(hidden: set[str], program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", HIDE.format(hidden=hidden) + program], capture_output=True, text=True, cwd=ROOT, env=os.environ
    )


def missing(module: str, extra: str) -> str:
    return f"{module} is not installed: install the extra {extra!r}, as docs/start/install.md says under Extras\n"


def test_the_library_needs_no_extras() -> None:
    program = """
import runpy
cr = runpy.run_path("tests/core_alone.py")["cr"]
try:
    cr.similarity_order
except ValueError as error:
    print(error)
"""
    shown = run_without(HIDDEN, program)
    assert shown.stdout == f"{ROOT}/comera_rec/__init__.py (3, 8)\n{missing('pyarrow', 'train')}", shown.stderr


@pytest.mark.parametrize(
    ("hidden", "command", "expected"),
    [
        (HIDDEN, "train", missing("click", "train")),
        ({"orjson"}, "serve", missing("orjson", "serve")),
    ],
)
def test_a_command_names_its_extra(hidden: set[str], command: str, expected: str) -> None:
    shown = run_without(hidden, f"from comera_rec.__main__ import main; main([{command!r}])")
    assert (shown.returncode, shown.stderr) == (2, f"comera: {expected}")


def test_every_optional_package_has_an_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, modules in EXTRAS.items():
        packages = [*extras[extra], *(extras["pipeline"] if extra == "train" else [])]
        named = [re.split("[<>=]", package)[0].replace("-", "_") for package in packages if "comera-rec" not in package]
        assert sorted(named) == sorted(modules)


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
