"""The commands of docs/guides/your-logs.md run unchanged, and do what the page says."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from warm_command import run_commands

from data_pipeline.manifest import read_manifest

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "your-logs.md"


def test_commands_run(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    printed = run_commands(PAGE, tmp_path, tmp_path_factory.mktemp("bin"))
    assert (tmp_path / "run" / "report.html").exists()
    assert (tmp_path / "run-2" / "report.html").exists()
    assert "extended matches its manifest: 500 rows" in printed
    columns = {column.name: column for column in read_manifest(tmp_path / "orders").categorical_columns}
    assert columns["customer"].num_embeddings == 1000
    assert columns["shop"].num_embeddings > 50
    orders = pd.read_csv(tmp_path / "orders.csv", parse_dates=["time"])
    assert read_manifest(tmp_path / "by-day").splits["test"].rows == (orders["time"] >= "2026-03-01").sum()
    grown = {column.name: column.grown for column in read_manifest(tmp_path / "extended").categorical_columns}
    assert grown == {"customer": (), "shop": (columns["shop"].num_embeddings,), "tags": ()}
