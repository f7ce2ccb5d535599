"""Collectives of several processes, and of a single one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from processes import run as run_processes
from torch.distributed.fsdp import FullyShardedDataParallel

from comera_rec import TTEmbeddingBag
from comera_rec.distributed import WORLD, join_launched, launcher_number

pytestmark = pytest.mark.distributed


def fail_if(condition: bool, value: int) -> int:
    if condition:
        raise ValueError(f"process {value} can't")
    return value


def message_of(on: str, failing: bool) -> str:
    with pytest.raises(ValueError) as caught:
        getattr(WORLD, on)(lambda: fail_if(failing, WORLD.process_rank))
    return str(caught.value)


def exchange(rank: int) -> dict[str, Any]:
    return {
        "rank": WORLD.process_rank,
        "size": WORLD.size,
        "on_first": WORLD.on_first(lambda: rank),
        "on_each": WORLD.on_each(lambda: rank * 10),
        "merge": WORLD.merge({"all": rank, f"of {rank}": rank}),
        "count": WORLD.count({"all": 0, f"of {rank}": 0}),
        "concatenate": WORLD.concatenate(torch.arange(rank + 1)).tolist(),
        "sum": WORLD.sum(torch.tensor([1.0, rank])).tolist(),
        "mean": WORLD.mean(torch.tensor(float(rank))).item(),
        "max": WORLD.max(rank),
        "any": [WORLD.any(rank == 1), WORLD.any(rank == 9)],
        "messages": [message_of("on_first", rank == 0), message_of("on_each", rank > 0)],
    }


def expected(rank: int, size: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "size": size,
        "on_first": 0,
        "on_each": [10 * each for each in range(size)],
        "merge": {"all": 0} | {f"of {each}": each for each in range(size)},
        "count": {"all": size, f"of {rank}": 1},
        "concatenate": [number for each in range(size) for number in range(each + 1)],
        "sum": [float(size), sum(range(size))],
        "mean": sum(range(size)) / size,
        "max": size - 1,
        "any": [True, False],
        "messages": ["process 0 can't", "process 1 can't"],
    }


def test_all_processes_agree() -> None:
    assert run_processes(3, exchange) == [expected(rank, 3) for rank in range(3)]


def test_one_process_agrees_with_itself() -> None:
    assert not WORLD.several
    assert WORLD.is_first
    assert WORLD.on_each(lambda: 7) == [7]
    assert WORLD.merge({"a": 1}) == {"a": 1}
    assert WORLD.max(3.0) == 3.0
    values = torch.tensor([1.0], requires_grad=True)
    assert not WORLD.mean(values).requires_grad
    assert message_of("on_first", True) == "process 0 can't"


def test_the_launchers_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE is 2 without RANK, MASTER_ADDR, MASTER_PORT: launch with torchrun"):
        join_launched(torch.device("cpu"))
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ValueError, match="the environment variable WORLD_SIZE is 'two': launch with torchrun, or unset it"):
        launcher_number("WORLD_SIZE", 1)


JOIN_AND_LEAVE = """
import atexit
from pathlib import Path

@atexit.register  # runs after the functions registered later
def print_threads():
    print(*(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")), sep=",")

import torch
import torch.distributed as dist
from comera_rec.distributed import join_launched, leave

join_launched(torch.device("cpu"))
cycle = [dist.group.WORLD]
cycle.append(cycle)  # as a model has that holds the group
del cycle
leave()
"""


def test_gloos_threads_end_before_python_does() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    command = [sys.executable, "-c", JOIN_AND_LEAVE]
    processes = [
        subprocess.Popen(command, env={**os.environ, **variables, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    printed = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert all("python" in threads and "gloo" not in threads for threads in printed), printed


def test_tables_in_fully_sharded_data_parallel_are_refused() -> None:
    assert run_processes(1, fully_sharded) == ["the table is in a FullyShardedDataParallel, which mixes up the gradients of cores"]


def fully_sharded(process_rank: int) -> str:
    warnings.simplefilter("ignore")
    bag = TTEmbeddingBag(1000, 16, tt_ranks=4)
    wrapped = FullyShardedDataParallel(bag, use_orig_params=True, device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match="FullyShardedDataParallel") as error:
        wrapped(torch.tensor([[1, 2]]))
    return str(error.value).partition(":")[0]
