"""The commands of docs/guides/serving.md run unchanged."""

from __future__ import annotations

import json
import re
import shutil
import socket
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from warm_command import run_commands

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "serving.md"


def test_commands_run(trained: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    if not shutil.which("curl"):
        pytest.skip("curl is not installed")
    (tmp_path / "runs").mkdir()
    for name, target in {
        "runs/compressed": trained,
        "data": trained.parent / "data",
        "today.txt": trained.parent / "train.txt",
    }.items():
        (tmp_path / name).symlink_to(target)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    printed = run_commands(PAGE, tmp_path, tmp_path_factory.mktemp("bin"), port=port)
    assert len(pq.read_table(tmp_path / "scores.parquet")) == 4000
    answers = re.findall(r'\{"scores":.*?\}', printed)
    assert len(answers) == 1
    assert 0 < json.loads(answers[0])["scores"][0] < 1
    assert '"platform":"torch_aoti"' in printed
    assert "comera_requests_total" in printed
    assert (tmp_path / "today" / "manifest.json").exists()
