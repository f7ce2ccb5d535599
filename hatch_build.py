"""Builds the operators in `comera_rec/csrc` and the loops in `data_pipeline/csrc` as one shared library each, for wheels and for
editable installs alike.

The operators use LibTorch's stable ABI and the loops use no library, so they work with every Python and with torch 2.11 or later;
wheels are `py3-none-<platform>`. The compiler is $CXX, or c++: g++ 12, clang++ 16, or a later one. Torch must be installed already
(`--no-build-isolation`).
COMERA_SANITIZE=1 builds libraries that check for address errors and undefined behavior, for `make test-sanitized`.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = ("ops", "serve", "interaction", "plan", "pool", "gradients", "memory", "instruction_sets")
# The loops over rows are compiled once for each instruction set; the one to use is chosen when they first run.
KERNELS = {"portable": []}
if platform.machine() in ("x86_64", "AMD64"):
    KERNELS["avx2"] = ["-mavx2", "-mfma", "-mf16c"]
    KERNELS["avx512"] = [*KERNELS["avx2"], "-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq"]
LIBRARY = Path("comera_rec/lib/libcomera_rec.so")
PIPELINE_SOURCES = ("cells", "parse", "encode")
PIPELINE_LIBRARY = Path("data_pipeline/lib/libdata_pipeline.so")
COMMON_FLAGS = ["-std=c++20", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
FLAGS = [
    *COMMON_FLAGS, "-Wno-psabi", "-Wno-unknown-warning-option", "-Wno-maybe-uninitialized",
    "-Wno-unused-parameter", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math",
    "-DTORCH_TARGET_VERSION=0x020b000000000000",  # the oldest torch that the library supports
]  # fmt: skip
Unit = tuple[Path, str, list[str]]  # a source file, its object's name, and its flags
SANITIZE = ["-g", "-O1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]


class CompileOperators(BuildHookInterface):
    """Compile the libraries before hatchling packs a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        root = Path(self.root)
        build(root, root / LIBRARY)
        build_pipeline(root, root / PIPELINE_LIBRARY)
        tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{tag}"
        build_data["pure_python"] = False
        build_data["artifacts"] += [f"/{LIBRARY}", f"/{PIPELINE_LIBRARY}"]


def build(root: Path, library: Path) -> None:
    """Compile and link the operators of the checkout at `root`."""
    torch = _torch()
    _build(operator_units(root), library, [f"-L{torch / 'lib'}", "-ltorch_cpu", "-ltorch", "-lc10"])


def operator_units(root: Path) -> list[Unit]:
    source, flags = root / "comera_rec/csrc", [*FLAGS, "-isystem", str(_torch() / "include")]
    # The slowest to compile come first.
    units = [
        (source / "kernels.cpp", name, [*flags, f"-DCOMERA_KERNELS={name}", *more]) for name, more in reversed(KERNELS.items())
    ]
    return units + [(source / f"{name}.cpp", name, flags) for name in SOURCES]


def build_pipeline(root: Path, library: Path) -> None:
    """Compile and link the data pipeline's loops of the checkout at `root`; they need nothing but the compiler."""
    _build(pipeline_units(root), library, [])


def pipeline_units(root: Path) -> list[Unit]:
    return [(root / f"data_pipeline/csrc/{name}.cpp", name, COMMON_FLAGS) for name in PIPELINE_SOURCES]


def _torch() -> Path:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise RuntimeError("building comera-rec requires torch's headers: install torch, then build with --no-build-isolation")
    return Path(spec.origin).parent


def _build(units: list[Unit], library: Path, libraries: list[str]) -> None:
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    is_sanitized = os.environ.get("COMERA_SANITIZE") == "1"
    more = SANITIZE if is_sanitized else ["-O3"]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [str(Path(folder) / f"{name}.o") for _, name, _ in units]
        commands = [
            [*compiler, *flags, *more, "-c", str(path), "-o", target]
            for (path, _, flags), target in zip(units, objects, strict=True)
        ]
        list(pool.map(_run, commands))
        library.parent.mkdir(parents=True, exist_ok=True)
        linked = Path(folder) / library.name
        _run([*compiler, "-shared", *(SANITIZE if is_sanitized else []), *objects, "-o", str(linked), *libraries])
        partial = library.with_name(library.name + ".partial")
        partial.write_bytes(linked.read_bytes())
        partial.replace(library)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise RuntimeError(
            f"building comera-rec requires a C++20 compiler, but {command[0]!r} was not found: install g++ 12 or clang++ 16, or a "
            "later one, and set CXX if c++ is another"
        ) from None
    if done.returncode:
        raise RuntimeError(f"compilation failed:\n{shlex.join(command)}\n{done.stderr}")
