"""The commands of docs/guides/your-logs.md run unchanged, and do what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd

from data_pipeline.manifest import read_manifest

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "your-logs.md"


def test_commands_run(tmp_path: Path) -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 8
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    script = "set -e\n" + "".join(blocks)
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "report.html").exists()
    assert (tmp_path / "run-2" / "report.html").exists()
    assert "extended matches its manifest: 500 rows" in done.stdout
    columns = {column.name: column for column in read_manifest(tmp_path / "orders").categorical_columns}
    assert columns["customer"].num_embeddings == 1000
    assert 50 < columns["shop"].num_embeddings <= 101
    orders = pd.read_csv(tmp_path / "orders.csv", parse_dates=["time"])
    assert read_manifest(tmp_path / "by-day").splits["test"].rows == (orders["time"] >= "2026-03-01").sum()
    grown = {column.name: column.grown for column in read_manifest(tmp_path / "extended").categorical_columns}
    assert grown == {"customer": (), "shop": (columns["shop"].num_embeddings,), "tags": ()}
