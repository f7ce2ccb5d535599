"""Collectives: everything that processes exchange, except for the ids and bags that TorchRec exchanges itself.

loss = WORLD.mean(loss)
path = WORLD.on_first(lambda: latest_checkpoint(folder))
"""

import atexit
import gc
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from data_pipeline.errors import UserError

Value = TypeVar("Value")


class Processes:
    """The processes of a group, default all, or this one alone where there is no process group, which may be created later.

    Each process calls the same methods in the same order; alone, they return at once.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    @property
    def size(self) -> int:
        """Number of processes."""
        return dist.get_world_size(self._group) if dist.is_available() and dist.is_initialized() else 1

    @property
    def process_rank(self) -> int:
        """Number of this process, from 0."""
        return dist.get_rank(self._group) if self.several else 0

    @property
    def several(self) -> bool:
        """Whether there is more than one process."""
        return self.size > 1

    @property
    def is_first(self) -> bool:
        """Whether this process writes and prints for all."""
        return self.process_rank == 0

    def on_first(self, act: Callable[[], Value]) -> Value:
        """Call `act` on process 0 only; every process returns its result, or raises its error."""
        outcomes = [_outcome(act) if self.is_first else (None, None)]
        if self.several:
            dist.broadcast_object_list(outcomes, group=self._group, group_src=0)
        value: Value = _value(*outcomes[0])
        return value

    def on_each(self, act: Callable[[], Value]) -> list[Value]:
        """Call `act` on every process; all return the results by process rank, or raise the first error in that order."""
        return [_value(*outcome) for outcome in self.gather(_outcome(act))]

    def gather(self, value: Value) -> list[Value]:
        """Return the values of all processes, in their order."""
        if not self.several:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, self._group)
        return values

    def merge(self, entries: dict[str, Value]) -> dict[str, Value]:
        """Merge the entries of all processes; where several have the same name, that of the lowest process rank stays."""
        return {name: value for local in reversed(self.gather(entries)) for name, value in local.items()}

    def count(self, entries: Mapping[str, object]) -> dict[str, int]:
        """Count, for each name of this process's entries, the processes that have an entry of that name."""
        names_by_process = self.gather(list(entries))
        return {name: sum(name in names for names in names_by_process) for name in entries}

    def concatenate(self, values: Tensor) -> Tensor:
        """Concatenate the values [n] of all processes, in their order; n may differ."""
        if not self.several:
            return values
        sizes = self.gather(len(values))
        parts = [values.new_empty(max(sizes)) for _ in sizes]  # all_gather requires equal sizes
        dist.all_gather(parts, torch.cat([values, values.new_zeros(max(sizes) - len(values))]), self._group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def sum(self, values: Tensor) -> Tensor:
        """Sum every process's values, entry by entry, without gradient."""
        total = values.detach().clone()
        if self.several:
            dist.all_reduce(total, group=self._group)
        return total

    def mean(self, values: Tensor) -> Tensor:
        """Average every process's values, entry by entry, without gradient."""
        return self.sum(values) / self.size

    def max(self, value: float) -> float:
        """Return the largest of the processes' values."""
        return float(self.start_max(torch.tensor(value, dtype=torch.float64))())

    def start_max(self, values: Tensor) -> Callable[[], Tensor]:
        """Start the maximum of the processes' values, entry by entry; the returned function waits for the result."""
        if not self.several:
            return lambda: values
        work = dist.all_reduce(values, dist.ReduceOp.MAX, self._group, async_op=True)
        assert work is not None

        def wait_for_maximum() -> Tensor:
            work.wait()
            return values

        return wait_for_maximum

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any process."""
        return bool(self.max(float(flag)))


WORLD = Processes()


def _outcome(act: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Return the result of `act`, or its error, whatever its type: the other processes wait for an outcome."""
    try:
        return act(), None
    except Exception as error:
        return None, error


def _value(value: Any, error: Exception | None) -> Any:
    if error is not None:
        raise error
    return value


def join_launched(device: torch.device) -> None:
    """Create the world's process group where a launcher such as torchrun started several processes, unless it exists.

    Args:
        device: the device of this process; collectives use NCCL for tensors on a GPU and gloo for those on the CPU.

    Raises:
        ValueError: if the launcher's variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) are missing or are not numbers.
    """
    if launcher_number("WORLD_SIZE", 1) == 1 or dist.is_initialized():
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise UserError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']} without {', '.join(missing)}: launch with torchrun, or unset WORLD_SIZE"
        )
    launcher_number("RANK", 0)
    # A launcher that restarts its processes keeps its store, with the old processes' addresses: each attempt needs a prefix.
    store, process_rank, world_size = next(dist.rendezvous("env://"))
    atexit.register(gc.collect)  # ends gloo's threads with the objects that hold the group: as Python exits, they may abort it
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.PrefixStore(f"attempt_{attempt}", store), rank=process_rank, world_size=world_size)


def leave() -> None:
    """Wait for the other processes, then destroy the group."""
    if WORLD.several:
        dist.barrier()
        dist.destroy_process_group()


def launcher_number(variable: str, default: int) -> int:
    """Return the number that a launcher set in an environment variable; ValueError if it is not a number."""
    text = os.environ.get(variable, str(default))
    if not text.isdigit():
        raise UserError(f"the environment variable {variable} is {text!r}: launch with torchrun, or unset it")
    return int(text)
