"""README and docs: snippets and commands run unchanged and do what pages say."""

import re
from pathlib import Path

import pandas as pd
import pytest
from page_commands import run_commands

from data_pipeline.manifest import read_manifest

ROOT = Path(__file__).parents[2]
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = {str(page.relative_to(ROOT)): page for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]}


@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if PYTHON.search(page.read_text())])
def test_snippets_run(name: str) -> None:
    """Run the blocks in order in one namespace."""
    names: dict[str, object] = {"__name__": "__main__"}
    for snippet in PYTHON.findall(PAGES[name].read_text()):
        exec(compile(snippet, name, "exec"), names)


def test_commands_of_the_quickstart(tmp_path: Path) -> None:
    printed = run_commands(PAGES["docs/start/quickstart.md"], tmp_path)
    assert (tmp_path / "report.html").exists()
    assert '"ne"' in printed.splitlines()[-1]


def test_commands_for_your_logs(tmp_path: Path) -> None:
    printed = run_commands(PAGES["docs/guides/your-logs.md"], tmp_path)
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
