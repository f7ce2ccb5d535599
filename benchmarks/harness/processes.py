"""Functions run on several gloo processes at once."""

from __future__ import annotations

import gc
import io
import logging
import multiprocessing
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# The server imports once what every process needs; they fork from it in milliseconds.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch._dynamo", "comera_rec.training.trainer"])


def run(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(rank, *args)` on each process of a group; what they return, by rank.

    Raises:
        RuntimeError: with the traceback of the first process that failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        queue = CONTEXT.SimpleQueue()
        processes = [
            CONTEXT.Process(target=_work, args=(rank, world_size, folder, queue, function, args), daemon=True)
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        results: list[Any] = [None] * world_size
        failed = set(range(world_size))
        try:
            for _ in processes:
                rank, error, written = queue.get()
                if error is not None:
                    raise RuntimeError(f"process {rank} of {world_size} failed:\n{error}")
                results[rank] = torch.load(io.BytesIO(written), weights_only=False)
                failed.discard(rank)
        finally:
            for process in processes:
                if failed:
                    process.terminate()
                process.join()
    return results


def _work(rank: int, world_size: int, folder: str, queue: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    gc.freeze()  # what the server imported is not this process's to collect
    # TorchRec tells of every table without a specification of its shards, and calls what torch has renamed.
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
        result = function(rank, *args)
        dist.barrier()
        dist.destroy_process_group()
        written = io.BytesIO()  # a tensor sent as it is would be lost with its process
        torch.save(result, written)
        queue.put((rank, None, written.getvalue()))
    except BaseException:
        queue.put((rank, traceback.format_exc(), None))
