"""Peak extra memory of calls, native allocations included, in a process that does nothing else."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from comera_rec.training.memory import return_freed_memory

Call = Callable[[int], object]
Prepared = tuple[Mapping[str, Call], Callable[[], None]]

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt
_LARGE = 64 << 10


def memory_is_measurable(device: str) -> bool:
    """Whether the peak can be reset and read here: on CPUs, under Linux."""
    return device == "cpu" and os.access(_CLEAR_REFS, os.W_OK)


def peak_extra_memory(prepare: Callable[..., Prepared], *arguments: Any, repeats: int = 2) -> dict[str, list[float]]:
    """Measure by how many MiB each call raises a fresh process's peak above its memory just before the call; by the call's name.

    That is the growth of the peak resident set (VmHWM), which covers every allocator.

    Args:
        prepare: a function importable by name. It runs in the child, does everything that should not be counted (imports, weights,
            warming up), and returns the calls by name and a function that frees what a call leaves behind.
        arguments: for `prepare`; picklable.
        repeats: how often each call is measured.

    Raises:
        ValueError: if the peak can't be reset here.
        RuntimeError: if the child fails or is killed.
    """
    if not memory_is_measurable("cpu"):
        raise ValueError("peak memory can't be reset on this system: measure it on Linux")
    # A fork server imports modules once but runs no kernels, so its forks start quickly and inherit no broken thread pools.
    context = multiprocessing.get_context("forkserver")
    # torch.optim imports torch._dynamo on first use, which takes seconds.
    ours = [name for name in sys.modules if name.startswith("benchmarks.")]
    context.set_forkserver_preload([*ours, prepare.__module__, "torch._dynamo"])
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_measure, args=(sender, prepare, arguments, repeats, torch.get_num_threads()))
    child.start()
    sender.close()
    try:
        peaks, error = receiver.recv()
    except EOFError:
        peaks, error = {}, ""
    child.join()
    if error or not peaks:
        raise RuntimeError(f"measuring memory failed in the child process (exit status {child.exitcode}): {error or 'killed'}")
    return dict(peaks)


def _measure(sender: Connection, prepare: Callable[..., Prepared], arguments: tuple[Any, ...], repeats: int, threads: int) -> None:
    try:
        torch.set_num_threads(threads)
        return_freed_memory_at_once()
        calls, release = prepare(*arguments)
        peaks: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(repeats):
            for name, call in calls.items():
                release()
                gc.collect()
                peaks[name].append(resident_peak(call, turn))
        sender.send((peaks, ""))
    except Exception as error:
        sender.send(({}, f"{type(error).__name__}: {error}"))


def resident_peak_mib() -> float:
    """The peak of this process's resident memory since it started, in MiB, libraries included."""
    return _kib("VmHWM") / 1024


def return_freed_memory_at_once() -> None:
    # glibc keeps freed blocks resident; a call that reuses them would not raise the peak.
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE)
        libc.mallopt(_M_TRIM_THRESHOLD, _LARGE)


def resident_peak(call: Call, turn: int) -> float:
    return_freed_memory()
    _CLEAR_REFS.write_text("5")  # sets VmHWM to VmRSS
    before = _kib("VmRSS")
    result = call(turn)
    peak = _kib("VmHWM")
    del result
    return max(0, peak - before) / 1024


def _kib(name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    assert match is not None, name
    return int(match[1])
