"""README and docs: snippets run as they stand, tables are as their rows, and the files they name exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.pages import ROOT, fill, filled, pages

PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = {str(page.relative_to(ROOT)): page for page in pages()}


@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if PYTHON.search(page.read_text())])
def test_snippets_run(name: str) -> None:
    """One block after the other, in the names that those before have left."""
    names: dict[str, object] = {"__name__": "__main__"}
    for snippet in PYTHON.findall(PAGES[name].read_text()):
        exec(compile(snippet, name, "exec"), names)


def test_the_swap_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    test_snippets_run("README.md")
    printed = capsys.readouterr().out
    assert "torch.Size([2, 64])" in printed
    assert "| 624,039 |" in printed


def test_commands_of_the_quickstart(tmp_path: Path) -> None:
    blocks = SHELL.findall(PAGES["docs/start/quickstart.md"].read_text())
    assert len(blocks) == 4
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["sh", "-c", "set -e\n" + "".join(blocks)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report.html").exists()
    assert '"ne"' in done.stdout.splitlines()[-1]


def test_tables_are_as_their_rows() -> None:
    result = CliRunner().invoke(fill, ["--check"])
    assert result.exit_code == 0, result.exception


def test_a_table_that_was_edited_and_one_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table hot-rows -->\n| 0.1x |\n<!-- end of table -->\nafter\n")
    monkeypatch.setattr("benchmarks.pages.pages", lambda: [page])
    monkeypatch.setattr("benchmarks.pages.ROOT", tmp_path)
    stale = CliRunner().invoke(fill, ["--check"])
    assert str(stale.exception) == "tables differ from their rows in page.md: run python -m benchmarks.pages"
    CliRunner().invoke(fill, [])
    text = page.read_text()
    assert "0.51x" in text
    assert "| 0.1x |" not in text
    assert text.startswith("before\n<!-- table hot-rows -->")
    assert text.endswith("<!-- end of table -->\nafter\n")
    page.write_text("<!-- table nothing -->\n<!-- end of table -->\n")
    with pytest.raises(ValueError, match=r"asks for a table 'nothing': choose one of whole-model, "):
        filled(page)


@pytest.mark.parametrize("name", PAGES)
def test_files_it_names_exist(name: str) -> None:
    text = re.sub(r"(?s)^```.*?^```", "", PAGES[name].read_text(), flags=re.MULTILINE)
    for path in re.findall(r"\]\(([^)#:\s]+)[)#]", text):
        assert (PAGES[name].parent / path).exists(), path
