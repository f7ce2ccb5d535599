"""Whole runs of preprocessing, each in its own process: seconds, CPU seconds and peak MiB."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.harness.environment import FOLDER

# Not getrusage's ru_maxrss: a child's starts at its parent's peak.
_COMERA = """
import json, re, sys, time
start = time.perf_counter()
from comera_rec.cli.main import main
try:
    main(["preprocess", *sys.argv[1:]])
finally:
    peak = re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())
    print(json.dumps([time.perf_counter() - start, time.process_time(), int(peak[1]) / 1024]))
"""


def run_comera(log: Path, output: Path, *options: str) -> tuple[float, float, float]:
    """Measure `comera preprocess`, imports included."""
    return _measure("-c", _COMERA, "--input", str(log), "--output", str(output), *options)


def run_provider(name: str, log: Path, output: Path) -> tuple[float, float, float]:
    """Measure a provider of `rivals.py`."""
    return _measure("-m", "benchmarks.data.rivals", name, str(output), str(log))


def _measure(*arguments: str) -> tuple[float, float, float]:
    done = subprocess.run([sys.executable, *arguments], cwd=FOLDER.parent, stdout=subprocess.PIPE, text=True, check=True)
    seconds, cpu, mib = json.loads(done.stdout.splitlines()[-1])
    return seconds, cpu, mib
