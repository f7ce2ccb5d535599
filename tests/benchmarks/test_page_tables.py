"""Tables and figures of README and docs match their rows."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

import benchmarks.pages
from benchmarks.page_tables.rows import RESULTS
from benchmarks.pages import FIGURES, fill, filled, stale_figures


def test_tables_and_figures_match_their_rows() -> None:
    result = CliRunner().invoke(fill, ["--check"])
    assert result.exit_code == 0, result.exception


def test_an_edited_table_is_regenerated_and_an_unknown_one_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table hot-rows -->\n| 0.1x |\n<!-- end of table -->\nafter\n")
    monkeypatch.setattr("benchmarks.pages.pages", lambda: [page])
    monkeypatch.setattr("benchmarks.pages.ROOT", tmp_path)
    stale = CliRunner().invoke(fill, ["--check"])
    assert str(stale.exception) == "page.md differ from their rows: run python -m benchmarks.pages"
    CliRunner().invoke(fill, [])
    text = page.read_text()
    assert "| 100x | " in text
    assert "| 0.1x |" not in text
    assert text.startswith("before\n<!-- table hot-rows -->")
    assert text.endswith("<!-- end of table -->\nafter\n")
    page.write_text("<!-- table nothing -->\n<!-- end of table -->\n")
    with pytest.raises(ValueError, match=r"asks for an unknown table 'nothing': choose one of whole-model, "):
        filled(page)


def test_a_figure_of_other_rows_is_drawn_again_and_every_figure_is_on_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, rows = "cpu-2-amd-epyc/sharding-grid.png", "cpu-2-amd-epyc/sharding-grid.jsonl"
    pages = "".join(page.read_text() for page in benchmarks.pages.pages())
    assert {str(path.relative_to(RESULTS)) for path in RESULTS.rglob("*.png")} == set(FIGURES)
    assert all(f"results/{figure}" in pages for figure in FIGURES)
    (tmp_path / name).parent.mkdir()
    (tmp_path / rows).write_bytes((RESULTS / rows).read_bytes())
    monkeypatch.setattr("benchmarks.pages.RESULTS", tmp_path)
    monkeypatch.setattr("benchmarks.pages.ROOT", tmp_path)
    monkeypatch.setattr("benchmarks.pages.pages", list)
    monkeypatch.setattr("benchmarks.pages.FIGURES", {name: rows})
    assert CliRunner().invoke(fill, []).output == f"wrote {name}\n"
    assert CliRunner().invoke(fill, ["--check"]).output == "all tables and figures match their rows\n"
    with (tmp_path / rows).open("a") as file:
        file.write((tmp_path / rows).read_text().splitlines()[-1] + "\n")
    assert list(stale_figures()) == [tmp_path / name]
