"""Run functions on several gloo processes of this machine, for tests and benchmarks of distributed models."""

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

# The fork server imports once what every process needs; forking from it takes milliseconds.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch._dynamo", "comera_rec.training.trainer"])


def run(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `function(process_rank, *args)` on each process of a group; return the results, ordered by process rank.

    Raises:
        RuntimeError: if a process fails, with the traceback of the first that did.
    """
    with tempfile.TemporaryDirectory() as folder:
        queue = CONTEXT.SimpleQueue()
        processes = [
            CONTEXT.Process(target=_work, args=(process_rank, world_size, folder, queue, function, args), daemon=True)
            for process_rank in range(world_size)
        ]
        for process in processes:
            process.start()
        results: list[Any] = [None] * world_size
        unfinished = set(range(world_size))
        try:
            for _ in processes:
                process_rank, error, saved = queue.get()
                if error is not None:
                    raise RuntimeError(f"process {process_rank} of {world_size} failed:\n{error}")
                results[process_rank] = torch.load(io.BytesIO(saved), weights_only=False)
                unfinished.discard(process_rank)
        finally:
            for process in processes:
                if unfinished:
                    process.terminate()
                process.join()
    return results


def _work(process_rank: int, world_size: int, folder: str, queue: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ |= {"RANK": str(process_rank), "LOCAL_RANK": str(process_rank)}
    os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    torch.set_num_threads(1)
    gc.freeze()  # exempt what the server imported from garbage collection
    # TorchRec warns about every table without a sharding specification, and calls functions that torch has renamed.
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=process_rank, world_size=world_size)
        result = function(process_rank, *args)
        dist.barrier()
        dist.destroy_process_group()
        buffer = io.BytesIO()  # a tensor sent directly would be lost when its process ends
        torch.save(result, buffer)
        queue.put((process_rank, None, buffer.getvalue()))
    except BaseException:
        queue.put((process_rank, traceback.format_exc(), None))
