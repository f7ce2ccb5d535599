"""Tables of README and docs match their rows."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.pages import fill, filled


def test_tables_match_their_rows() -> None:
    result = CliRunner().invoke(fill, ["--check"])
    assert result.exit_code == 0, result.exception


def test_an_edited_table_is_regenerated_and_an_unknown_one_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table hot-rows -->\n| 0.1x |\n<!-- end of table -->\nafter\n")
    monkeypatch.setattr("benchmarks.pages.pages", lambda: [page])
    monkeypatch.setattr("benchmarks.pages.ROOT", tmp_path)
    stale = CliRunner().invoke(fill, ["--check"])
    assert str(stale.exception) == "tables differ from their rows in page.md: run python -m benchmarks.pages"
    CliRunner().invoke(fill, [])
    text = page.read_text()
    assert "| 100x | " in text
    assert "| 0.1x |" not in text
    assert text.startswith("before\n<!-- table hot-rows -->")
    assert text.endswith("<!-- end of table -->\nafter\n")
    page.write_text("<!-- table nothing -->\n<!-- end of table -->\n")
    with pytest.raises(ValueError, match=r"asks for an unknown table 'nothing': choose one of whole-model, "):
        filled(page)
