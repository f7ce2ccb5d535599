"""README and docs: snippets run unchanged, and the files that they name exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from warm_command import comera_on_path

ROOT = Path(__file__).parents[2]
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
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
    blocks = SHELL.findall(PAGES["docs/start/quickstart.md"].read_text())
    assert len(blocks) == 4
    command = ["sh", "-c", "set -e\n" + "".join(blocks)]
    with comera_on_path(tmp_path_factory.mktemp("bin")) as environment:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report.html").exists()
    assert '"ne"' in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("name", PAGES)
def test_named_files_exist(name: str) -> None:
    text = re.sub(r"(?s)^```.*?^```", "", PAGES[name].read_text(), flags=re.MULTILINE)
    for path in re.findall(r"\]\(([^)#:\s]+)[)#]", text):
        assert (PAGES[name].parent / path).exists(), path
