"""The report: correct numbers, no external resources, unfinished runs are shown, folders that aren't runs are refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from refusals import refuse

from comera_rec.report.page import summary_table, write_report, write_summary
from comera_rec.report.runs import read_runs


def layer(name: str, rows: int, *, ranks: list[int] | None = None, params: int | None = None) -> dict[str, Any]:
    dense = rows * 16
    params = dense if params is None else params
    table = f"sparse_arch.embedding_bag_collection.tt_bags.{name}"
    sizes = {"params": params, "bytes": 4 * params, "dense_params": dense, "dense_bytes": 4 * dense}
    shapes = {"row_shape": [50, rows // 50], "col_shape": [4, 4]} if ranks else {"row_shape": None, "col_shape": None}
    described = {"name": table, "kind": "table", "shape": [rows, 16], "format": "tt" if ranks else "dense", "ranks": ranks}
    return described | shapes | sizes | {"ratio": dense / params if params else None}


def write_run(folder: Path, layers: list[dict[str, Any]], *, adapting: bool = False, finished: bool = True, **numbers: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"output": "<script>alert(1)</script>", "seed": 3}))
    lines: list[dict[str, Any]] = [
        {"kind": "train", "step": step, "loss": 0.5 + 1 / step, "step_ms": 12.0, "memory_mib": 90.0, "rows": 64 * step}
        for step in range(10, 310, 10)
    ]
    lines += [
        {"kind": "eval", "split": "val", "step": step, "auc": 0.7 + step / 1e4, "ne": 0.9, "logloss": 0.45, "rows": 50}
        for step in (100, 200, 300)
    ]
    lines += [{"kind": "eval", "split": "test", "step": 300, "auc": 0.5, "ne": 1.0, "logloss": 0.6, "rows": 50}] if finished else []
    for step, stage, rank in ((0, "early", 8), (100, "late", 6), (200, "late", 0), (300, "done", 0))[: 4 if adapting else 1]:
        ranks = {entry["name"]: [rank] for entry in layers if entry["ranks"]}
        lines.append({"kind": "ranks", "step": step, "stage": stage, "params": 900 - step, "target_params": 700, "ranks": ranks})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines) + ("" if finished else '{"kind": "tra'))
    if finished:
        sums = {key: sum(entry[key] for entry in layers) for key in ("params", "bytes", "dense_params", "dense_bytes")}
        result = {"name": folder.name, "steps": 300, "split": "test", "rows": 50, "auc": 0.75, "ne": 0.85, "logloss": 0.44}
        result |= sums | {"table_bytes": sums["bytes"], "dense_table_bytes": sums["dense_bytes"]}
        result |= {"step_ms": 20.0, "peak_mib": 1000.0, "rows_per_s": 3200.0}
        result |= {"device": "a CPU", "versions": {"torch": "2.13"}, "seed": 3, "data": {"rows": 500}, "layers": layers}
        (folder / "result.json").write_text(json.dumps(result | numbers))
    return folder


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return write_run(tmp_path / "dense", [layer("C1", 1_000), layer("C2", 200_000)])


@pytest.fixture
def compressed(tmp_path: Path) -> Path:
    layers = [layer("C1", 1_000), layer("C2", 200_000, ranks=[8], params=34_567)]
    return write_run(tmp_path / "compressed", layers, adapting=True, auc=0.7479, step_ms=10.0, peak_mib=250.0)


@pytest.fixture
def running(tmp_path: Path) -> Path:
    return write_run(tmp_path / "running", [], finished=False)


def cells_of(page: str) -> list[str]:
    """The texts of a page's table cells."""
    return [re.sub(r"<[^>]*>|\n", "", cell) for cell in re.findall(r"(?s)<t[dh]\b.*?>(.*?)</t[dh]>", page)]


def test_page(dense: Path, compressed: Path, running: Path, tmp_path: Path) -> None:
    write_report(read_runs([dense, compressed, running]), tmp_path / "new" / "report.html")
    text = (tmp_path / "new" / "report.html").read_text()
    assert all(reference.startswith("#") for reference in re.findall(r'\b(?:src|href)="([^"]*)"', text))
    assert not re.search(r"url\((?!#)|@import", text)
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(ids) == len({*ids}), "ids of two drawings clash"
    # Loss, NE, AUC, step time, memory, size, and ranks of the one compressed run.
    assert text.count("<svg") == 7
    assert "<script>alert" not in text
    for number in ("3,216,000", "50,567", "63.6x smaller", "-0.0021", "0.5x", "0.25x", "138,268", "12,800,000"):
        assert any(number in cell for cell in cells_of(text)), number
    assert "running</strong> has not finished: it is shown as of step 300" in text
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["report.html"]


def test_one_run_alone(running: Path, tmp_path: Path) -> None:
    write_report(read_runs([running]), tmp_path / "report.html")
    assert "smaller tables" not in (tmp_path / "report.html").read_text()
    (running / "metrics.jsonl").unlink()
    write_report(read_runs([running]), tmp_path / "report.html")
    assert "<svg" not in (tmp_path / "report.html").read_text()


def test_vanished_layers_and_names_that_are_no_formulas(tmp_path: Path) -> None:
    name = r"$\foo$"
    layers = [layer("C1", 1_000), layer(name, 1_000, ranks=[0], params=0)]
    runs = [write_run(tmp_path / each, layers, adapting=True, auc=None) for each in (name, "$x", "dense")]
    write_report(read_runs(runs), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert {"gone", "-\u00a0"} < {*cells_of(page)}
    assert re.findall(r'"card"><b>(.*)</b>', page) == ["1x"] * 3, "numbers that a run lacks aren't compared"
    assert page.count(name) > 3


def test_summary_table(dense: Path, compressed: Path, running: Path) -> None:
    lines = [re.split(r"\s{2,}", line) for line in summary_table(read_runs([dense, compressed, running])).splitlines()]
    assert lines[0] == ["run", "Parameters", "Model", "Tables", "AUC", "NE", "Logloss", "ms / step", "Peak MiB"]
    assert lines[2] == ["dense", "3,216,000", "12.27 MiB", "12.27 MiB", "0.7500", "0.8500", "0.4400", "20.0", "1,000"]
    assert lines[3][:5] == ["compressed", "50,567", "197.53 KiB", "197.53 KiB", "0.7479"]
    assert lines[4] == ["", "vs dense", *["63.6x smaller"] * 3, "-0.0021", "+0.0000", "+0.0000", "0.5x", "0.25x"]
    for name, where in ("other", {"split": "val"}), ("later", {"rows": 60}):
        other = write_run(compressed.parent / name, [], **where)
        assert "compressed (test split, 50 rows)" in summary_table(read_runs([dense, compressed, other]))
    assert lines[5] == ["running (step 300, not finished)", "-", "-", "-", "0.7300", "0.9000", "0.4500", "-", "-"]


def test_summary(compressed: Path, running: Path, tmp_path: Path) -> None:
    diverged = write_run(tmp_path / "diverged", [layer("C1", 1_000)], step_ms=float("nan"))
    write_summary(read_runs([compressed, running, diverged]), tmp_path / "summary.json")
    write_report(read_runs([diverged]), tmp_path / "report.html")
    summary = json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)
    assert summary["diverged"]["step_ms"] is None
    expected = {"params": 50_567, "table_bytes": 202_268, "auc": 0.7479, "ne": 0.85, "peak_mib": 250.0, "finished": True}
    assert summary["compressed"].items() >= expected.items()
    assert summary["running"].items() >= {"finished": False, "params": None, "auc": 0.73}.items()
    namesake = write_run(tmp_path / "other" / "compressed", [])
    write_summary(read_runs([compressed, namesake]), tmp_path / "summary.json")
    assert [*json.loads((tmp_path / "summary.json").read_text())] == [str(compressed), str(namesake)]


def test_absent_and_damaged_files(tmp_path: Path, compressed: Path) -> None:
    refuse("no run to report on", read_runs, [])
    refuse("absent is not a run: it holds no", read_runs, [compressed, tmp_path / "absent"])
    metrics = (compressed / "metrics.jsonl").read_text().splitlines()
    for damaged in (b"text", b'{"kind": "tr\xffin"}'):
        lines = [*(line.encode() for line in metrics[:2]), damaged, *(line.encode() for line in metrics[2:]), b""]
        (compressed / "metrics.jsonl").write_bytes(b"\n".join(lines))
        refuse(r"metrics.jsonl, line 3, is damaged .*; remove the line", read_runs, [compressed])
    (compressed / "result.json").write_bytes(b'{"auc": "\xff"}')
    (compressed / "metrics.jsonl").unlink()
    refuse(r"result.json is damaged .*; train the run again", read_runs, [compressed])
