"""Run functions on several gloo processes of this machine, for tests and benchmarks of distributed models."""

import gc
import logging
import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, start_processes

CONTEXT = multiprocessing.get_context("forkserver")


def run(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `function(process_rank, *args)` on each process of a group; return the results, ordered by process rank.

    Raises:
        RuntimeError: if a process fails, with the traceback of the first that did.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            start_processes(_work, (world_size, folder, function, args), world_size, daemon=True, start_method="forkserver")
        except ProcessException as error:
            raise RuntimeError(f"one of {world_size} processes failed:\n{error}") from error
        return [torch.load(f"{folder}/{process_rank}", weights_only=False) for process_rank in range(world_size)]


def _work(process_rank: int, world_size: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ |= {"RANK": str(process_rank), "LOCAL_RANK": str(process_rank)}
    os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    torch.set_num_threads(1)
    gc.freeze()  # exempt what the server imported from garbage collection
    # TorchRec warns about every table without a sharding specification, and calls functions that torch has renamed.
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=process_rank, world_size=world_size)
    result = function(process_rank, *args)
    dist.barrier()
    dist.destroy_process_group()
    torch.save(result, f"{folder}/{process_rank}")
