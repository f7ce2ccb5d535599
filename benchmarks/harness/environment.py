"""The hardware and software on which a benchmark runs."""

import os
import platform
import re
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from comera_rec.ops.native import ops

FOLDER = Path(__file__).parents[1]
PACKAGES = {"torch": "torch", "torchrec": "torchrec", "fbgemm": "fbgemm-gpu-cpu fbgemm-gpu", "comera-rec": "comera-rec"}


def machine_kind(device: str) -> str:
    """A folder name for machines whose times are comparable, such as "nvidia-h200" or "cpu-2-amd-epyc-avx2"."""
    if device.startswith("cuda"):
        return _slug(torch.cuda.get_device_name(device))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return _slug(f"cpu {cores} {_cpu_model()} {ops.cpu()}")


def results_path(name: str, device: str) -> Path:
    """The committed results file of a benchmark on this kind of machine; its folder exists."""
    folder = FOLDER / "results" / machine_kind(device)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name}.jsonl"


def comera(*words: object) -> str:
    """Run a command of `comera` in a process of its own; return the last line that it prints.

    Raises:
        RuntimeError: if it fails, with what it says.
    """
    command = [sys.executable, "-m", "comera_rec", *map(str, words)]
    done = subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command}:\n{done.stderr}")
    return done.stdout.splitlines()[-1]


def describe(device: str) -> dict[str, Any]:
    """The fields of a row that are the same for a whole run, except seed and date."""
    return {
        "device": torch.device(device).type,
        "machine": machine_kind(device),
        "hardware": _hardware(),
        "versions": {"python": platform.python_version(), **{name: _version(names.split()) for name, names in PACKAGES.items()}},
        "threads": torch.get_num_threads(),
        "commit": _commit(),
    }


def _hardware() -> dict[str, str]:
    """What the CPU model's name doesn't tell: vector instructions, caches, memory, and the huge-page setting."""
    caches, huge = Path("/sys/devices/system/cpu/cpu0/cache"), Path("/sys/kernel/mm/transparent_hugepage/enabled")
    vectors = [flag for flag in _cpuinfo("flags").split() if re.match(r"avx|fma|f16c|amx", flag)]
    hardware = {"cpu": _cpu_model(), "flags": " ".join(vectors), "kernels": ops.cpu()}
    for folder in sorted(caches.glob("index*")):
        level, kind, size = ((folder / name).read_text().strip() for name in ("level", "type", "size"))
        hardware[f"L{level} {kind.lower()}"] = size
    hardware["huge pages"] = re.sub(r".*\[(.*)\].*", r"\1", huge.read_text().strip()) if huge.exists() else "unknown"
    return hardware


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)|@.*", "", text.lower())).strip("-")


def _cpu_model() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _cpuinfo(name: str) -> str:
    cpuinfo = Path("/proc/cpuinfo")
    match = re.search(rf"^{name}\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    return match[1] if match else ""


def _version(names: list[str]) -> str:
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "none"


@cache
def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
