"""Collectives of several processes, and of a single one."""

import os
import socket
import subprocess
import sys
import warnings

import pytest
import torch
from processes import run as run_processes
from refusals import refuse
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from comera_rec import RankScheduler, TTEmbeddingBag, TTLinear
from comera_rec.distributed import WORLD, join_launched, launcher_number
from comera_rec.rank import RankConfig

pytestmark = pytest.mark.distributed


def message_of(on: str, failing: bool) -> str:
    def call() -> None:
        if failing:
            raise ValueError(f"process {WORLD.process_rank} can't")

    with pytest.raises(ValueError) as caught:
        getattr(WORLD, on)(call)
    return str(caught.value)


def agree(rank: int, size: int) -> None:
    assert (WORLD.process_rank, WORLD.size, WORLD.several, WORLD.is_first) == (rank, size, size > 1, rank == 0)
    assert WORLD.on_first(lambda: rank) == 0
    assert WORLD.on_each(lambda: rank * 10) == [0, 10, 20][:size]
    assert WORLD.merge({"all": rank, f"of {rank}": rank}) == {"all": 0} | {f"of {each}": each for each in range(size)}
    assert WORLD.count({"all": 0, f"of {rank}": 0}) == {"all": size, f"of {rank}": 1}
    assert WORLD.concatenate(torch.arange(rank + 1)).tolist() == [0, 0, 1, 0, 1, 2][: size * (size + 1) // 2]
    assert WORLD.sum(torch.tensor([1.0, rank])).tolist() == [size, sum(range(size))]
    mean = WORLD.mean(torch.tensor(float(rank), requires_grad=True))
    assert (mean.item(), mean.requires_grad) == ((size - 1) / 2, False)
    assert WORLD.max(rank) == size - 1
    assert [WORLD.any(rank == size - 1), WORLD.any(rank == 9)] == [True, False]
    assert message_of("on_first", rank == 0) == "process 0 can't"
    assert message_of("on_each", rank > 0 or size == 1) == f"process {min(1, size - 1)} can't"


def test_all_processes_agree_and_one_with_itself() -> None:
    run_processes(3, agree, 3)
    agree(0, 1)


def test_the_launchers_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    refuse("WORLD_SIZE is 2 without RANK, MASTER_ADDR, MASTER_PORT: launch with torchrun", join_launched, torch.device("cpu"))
    monkeypatch.setenv("WORLD_SIZE", "two")
    refuse("the environment variable WORLD_SIZE is 'two': launch with torchrun, or unset it", launcher_number, "WORLD_SIZE", 1)


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


def fully_sharded(process_rank: int) -> None:
    warnings.simplefilter("ignore")
    bag = TTEmbeddingBag(1000, 16, tt_ranks=4)
    wrapped = FullyShardedDataParallel(bag, use_orig_params=True, device_id=torch.device("cpu"))
    refuse("the table is in a FullyShardedDataParallel, which mixes up the gradients of cores", wrapped, torch.tensor([[1, 2]]))
    layer = fully_shard(TTLinear(64, 64, tt_ranks=4), mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.SGD(layer.parameters())
    refuse(
        "fully_shard cut TT modules into parts",
        RankScheduler,
        layer,
        optimizer,
        RankConfig(early_steps=1),
    )


def test_tables_in_fully_sharded_data_parallel_are_refused() -> None:
    run_processes(1, fully_sharded)
