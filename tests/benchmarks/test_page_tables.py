"""Tables and figures of README and docs match their rows."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

import benchmarks.pages
from benchmarks.pages import FIGURES, RESULTS, fill, filled, stale_figures


def test_tables_and_figures_match_their_rows() -> None:
    result = CliRunner().invoke(fill, ["--check"])
    assert result.exit_code == 0, result.exception
    pages = "".join(page.read_text() for page in benchmarks.pages.pages())
    assert {str(path.relative_to(RESULTS)) for path in RESULTS.rglob("*.png")} == set(FIGURES)
    assert all(f"results/{figure}" in pages for figure in FIGURES)
    assert all(str(rows.relative_to(RESULTS.parent)) in pages for rows in RESULTS.rglob("*.jsonl"))


def test_an_edited_table_is_regenerated_and_an_unknown_one_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table linear -->\n| 0.1x |\n<!-- end of table -->\nafter\n")
    text = filled(page)
    assert "| 256 x 256 | " in text
    assert "| 0.1x |" not in text
    assert text.startswith("before\n<!-- table linear -->")
    assert text.endswith("<!-- end of table -->\nafter\n")
    page.write_text("<!-- table nothing -->\n<!-- end of table -->\n")
    with pytest.raises(ValueError, match=r"asks for an unknown table 'nothing': choose one of whole-model, "):
        filled(page)


def test_a_figure_of_other_rows_is_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [(name, pattern)] = FIGURES.items()
    monkeypatch.setattr(benchmarks.pages, "RESULTS", tmp_path)
    (tmp_path / name).write_bytes((RESULTS / name).read_bytes())
    for rows in RESULTS.glob(pattern):
        (tmp_path / rows.parent.name).mkdir()
        (tmp_path / rows.relative_to(RESULTS)).write_bytes(rows.read_bytes())
    assert not stale_figures()
    with (tmp_path / rows.relative_to(RESULTS)).open("a") as file:
        file.write(rows.read_text().splitlines()[-1] + "\n")
    assert list(stale_figures()) == [tmp_path / name]
