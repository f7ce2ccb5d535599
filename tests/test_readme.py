"""The README's Python runs as it stands, one block after the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def test_snippets_run(capsys: pytest.CaptureFixture[str]) -> None:
    snippets = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert len(snippets) >= 2
    names: dict[str, object] = {}
    for snippet in snippets:
        exec(compile(snippet, str(README), "exec"), names)
    printed = capsys.readouterr().out
    assert "torch.Size([2, 64])" in printed
    assert "done" in printed


def test_files_it_names_exist() -> None:
    for path in re.findall(r"\]\(([^)#:]+)\)", README.read_text()):
        assert (README.parent / path).exists(), path
