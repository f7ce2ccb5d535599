"""README and docs: snippets run unchanged, and the files that they name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from warm_command import run_commands

ROOT = Path(__file__).parents[2]
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = {str(page.relative_to(ROOT)): page for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]}


@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if PYTHON.search(page.read_text())])
def test_snippets_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Run the blocks in order in one namespace."""
    names: dict[str, object] = {"__name__": "__main__"}
    for snippet in PYTHON.findall(PAGES[name].read_text()):
        exec(compile(snippet, name, "exec"), names)
    if name == "README.md":  # the swap
        printed = capsys.readouterr().out
        assert "torch.Size([2, 64])" in printed
        assert "| 624,039 |" in printed


def test_commands_of_the_quickstart(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    printed = run_commands(PAGES["docs/start/quickstart.md"], tmp_path, tmp_path_factory.mktemp("bin"))
    assert (tmp_path / "report.html").exists()
    assert '"ne"' in printed.splitlines()[-1]


@pytest.mark.parametrize("name", PAGES)
def test_named_files_exist(name: str) -> None:
    text = re.sub(r"(?s)^```.*?^```", "", PAGES[name].read_text(), flags=re.MULTILINE)
    for path in re.findall(r"\]\(([^)#:\s]+)[)#]", text):
        assert (PAGES[name].parent / path).exists(), path
