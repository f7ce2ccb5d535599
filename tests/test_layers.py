"""Imports point down the layers, docstrings' examples run, optional packages are named, and code suits other compilers."""

import ast
import doctest
import importlib
import pkgutil
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import comera_rec
import data_pipeline
from data_pipeline.errors import EXTRAS
from hatch_build import operator_units, pipeline_units

ROOT = Path(comera_rec.__file__).parents[1]
# Lowest first; a layer imports those before it. train.py, the script for torchrun, is another entry to the command line.
LAYERS = [
    "distributed", "tt", "ops", "nn", "rank", "recsys", "convert", "data", "report", "training", "serving", "cli", "train",
]  # fmt: skip
READS_MANIFEST = {"data_pipeline", "data", "training", "serving", "cli", "train"}
ANYWHERE = {"data_pipeline.atomic", "data_pipeline.errors", "data_pipeline.similarity"}  # know nothing of data sets
BELOW_TORCHREC = {"distributed", "tt", "ops", "nn", "rank"}
# Optional packages, which a function may import: accelerators, clusters and other engines.
OPTIONAL = {"triton", "distributed", "onnxruntime", "onnxscript"}

FILES = sorted([*Path(comera_rec.__file__).parent.rglob("*.py"), *Path(data_pipeline.__file__).parent.rglob("*.py")])
INFOS = [info for root in (comera_rec, data_pipeline) for info in pkgutil.walk_packages(root.__path__, f"{root.__name__}.")]
CANDIDATES = (*(f"clang++-{version}" for version in range(30, 15, -1)), "clang++")
CLANG = next(filter(None, map(shutil.which, CANDIDATES)), None)


def imports(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    """Yield (statement, module's absolute name) of every import, wherever it is."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield node, node.module or ""
            # `from comera_rec import nn` imports comera_rec.nn
            yield from ((node, f"{node.module}.{alias.name}") for alias in node.names if node.module == "comera_rec")


def layer_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return parts[1] if parts[0] == "comera_rec" else parts[0]


def violations(file: Path, tree: ast.Module) -> list[str]:
    layer, found = layer_of(file), []
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    for node, module in imports(tree):
        package, _, rest = module.partition(".")
        target = rest.partition(".")[0]
        where = f"{file.relative_to(ROOT)}:{node.lineno}: {module}"
        if id(node) in inside and package not in OPTIONAL:
            found.append(f"{where} is imported inside a function")
        if layer == "data_pipeline" and package == "comera_rec":
            found.append(f"{where}: data_pipeline knows nothing of comera_rec")
        if layer in BELOW_TORCHREC and package in ("torchrec", "fbgemm_gpu"):
            found.append(f"{where}: TorchRec is known from recsys upwards")
        if package == "data_pipeline" and layer not in READS_MANIFEST and module not in ANYWHERE:
            found.append(f"{where}: only training and above read the manifest")
        if package == "comera_rec" and {layer, target} <= set(LAYERS) and LAYERS.index(target) > LAYERS.index(layer):
            found.append(f"{where}: {layer} is below {target}")
        if layer in LAYERS and module == "comera_rec":
            found.append(f"{where}: import the layer, not the package that gathers all of them")
    return found


def test_imports_point_down() -> None:
    found = []
    for file in FILES:
        if file != ROOT / "comera_rec" / "__init__.py":  # lazily re-exports names of all layers
            assert layer_of(file) in {*LAYERS, "data_pipeline", "__init__", "__main__"}, "a folder that DESIGN's layers do not name"
            found += violations(file, ast.parse(file.read_text()))
    assert found == []


def test_only_their_tests_import_benchmarks_and_examples() -> None:
    for folder in ("tests", "examples"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            allowed = file.relative_to(ROOT).parts[1] if folder == "tests" else "examples"
            imported = {module.partition(".")[0] for _, module in imports(ast.parse(file.read_text()))}
            assert imported & {"benchmarks", "examples"} <= {allowed}, file


@pytest.mark.parametrize("name", [info.name for info in INFOS if not info.name.endswith("__main__")])
def test_docstring_examples(name: str) -> None:
    if name.endswith(".triton"):
        pytest.importorskip("triton", reason="triton is not installed")
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs={"torch": torch}, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0, "see the captured output"


def test_every_public_name_exists() -> None:
    for name in comera_rec.__all__:
        assert getattr(comera_rec, name).__doc__, f"{name} has no docstring"
    assert set(comera_rec.__all__) <= set(dir(comera_rec))
    assert len(comera_rec.__all__) <= 20, "other names are attributes of their packages"
    with pytest.raises(AttributeError, match="module 'comera_rec' has no attribute 'no_such_name'"):
        _ = comera_rec.no_such_name


OF_TORCH = {"filelock", "fsspec", "jinja2", "tqdm"}  # torch and TorchRec require these themselves
HIDDEN = {module for modules in EXTRAS.values() for module in modules} - OF_TORCH | {"dask", "onnx", "pandas", "triton"}
HIDE = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *others: None if name.partition(".")[0] in {hidden} else find(name, *others)
"""


def run_without(hidden: set[str], program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", HIDE.format(hidden=hidden) + program], capture_output=True, text=True, cwd=ROOT)


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


@pytest.mark.parametrize(("hidden", "module", "command"), [(HIDDEN, "click", "train"), ({"orjson"}, "orjson", "serve")])
def test_a_command_names_its_extra(hidden: set[str], module: str, command: str) -> None:
    shown = run_without(hidden, f"from comera_rec.__main__ import main; main([{command!r}])")
    assert (shown.returncode, shown.stderr) == (2, f"comera: {missing(module, command)}")


def test_every_optional_package_has_an_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, modules in EXTRAS.items():
        packages = [*extras[extra], *(extras["pipeline"] if extra == "train" else [])]
        named = [re.split("[<>=]", package)[0].replace("-", "_") for package in packages if "comera-rec" not in package]
        assert sorted(named) == sorted(modules)


@pytest.mark.skipif(CLANG is None, reason="clang++ is not installed")
def test_clang_accepts_every_unit() -> None:
    version = subprocess.run([CLANG, "-dumpversion"], capture_output=True, text=True, check=True).stdout
    if int(version.split(".")[0]) < 16:
        pytest.skip(f"clang++ {version.strip()} is older than 16, the oldest with _Float16 on every x86-64")
    for path, name, flags in (*operator_units(ROOT), *pipeline_units(ROOT)):
        done = subprocess.run([CLANG, *flags, "-Werror", "-fsyntax-only", str(path)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{name}: {done.stderr}"
