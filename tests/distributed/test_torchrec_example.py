"""TorchRec's training script in dense and in tensor-train form: both train on two processes."""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import socket
from pathlib import Path

import pytest
import torch
from processes import CONTEXT

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "torchrec"


def in_forks(example: Path, printed: Path) -> str:
    """Run as under torchrun, but without importing torch and TorchRec three more times; return what is printed, into a file."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    processes = [CONTEXT.Process(target=run_script, args=(example, environment | {"RANK": str(k)}, printed)) for k in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    return printed.read_text()


def run_script(example: Path, environment: dict[str, str], printed: Path) -> None:
    os.environ |= environment
    torch.set_num_threads(1)
    with printed.open("a") as file, contextlib.redirect_stdout(file):
        runpy.run_path(str(example), run_name="__main__")


@pytest.mark.distributed
def test_both_forms_train_on_two_processes(tmp_path: Path) -> None:
    parameters = {}
    for name in ("train_dlrm.py", "train_dlrm_tt.py"):
        printed = in_forks(EXAMPLES / name, tmp_path / f"{name}.txt")
        losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", printed, re.MULTILINE)]
        assert len(losses) >= 4
        assert losses[0] > 0.3  # a fair coin's is 0.69
        assert losses[-1] < 0.2
        parameters[name] = int(re.search(r"^tables: (\S+) parameters$", printed, re.MULTILINE)[1].replace(",", ""))
    assert parameters["train_dlrm.py"] > 50 * parameters["train_dlrm_tt.py"]
