"""`comera synth` and `comera preprocess` as users see them: exit status, summary, one line for each mistake."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from data_pipeline.manifest import read_manifest
from tests.training.run_folders import call as run


@pytest.fixture
def log(tmp_path: Path) -> Path:
    assert run("synth", "--rows", 200, "--output", tmp_path / "raw" / "log.txt", "--scale", 0.001) == 0
    return tmp_path / "raw" / "log.txt"


def test_the_demo_replaces_only_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    demo = ["make", "--no-print-directory", "--old-file=install", "demo", f"DEMO={tmp_path}", "COMERA=false"]
    shown = subprocess.run(demo, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert shown.stdout == f"{tmp_path} holds files that make demo didn't write: name another folder, as in make demo DEMO=folder\n"
    assert (tmp_path / "mine").exists()
    (tmp_path / "mine").rename(tmp_path / ".demo")
    (tmp_path / "left over").write_text("")
    subprocess.run(demo, cwd=Path(__file__).parents[2], capture_output=True)
    assert [path.name for path in tmp_path.iterdir()] == [".demo"]


def test_options_reach_the_manifest(log: Path, tmp_path: Path) -> None:
    flags = "--min-count 3 --min-count C3=10 --val-fraction 0.2 --test-fraction 0.3 --part-size 10KiB --max-bad-rows 5"
    assert run("preprocess", "--input", log, "--output", tmp_path / "data", *flags.split()) == 0
    manifest = read_manifest(tmp_path / "data")
    chosen = {"val_fraction": 0.2, "test_fraction": 0.3, "min_count": 3, "part_bytes": 10 << 10, "max_bad_rows": 5}
    assert manifest.options == {"split": "chronological", **chosen}
    assert [column.min_count for column in manifest.categorical_columns[1:4]] == [3, 10, 3]
    assert len(manifest.splits["train"].shards) > 1
    assert run("preprocess", "--input", log, "--output", tmp_path / "data") == 2
    assert run("preprocess", "--input", log, "--output", tmp_path / "data", "--overwrite", "--split", "random", "--seed", 3) == 0
    assert read_manifest(tmp_path / "data").options["seed"] == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["synth", "--rows", "0", "--output", "log.txt"], "comera: --rows is 0; it must be at least 1"),
        (["preprocess", "--output", "data"], "Missing option '--input'"),
        (["preprocess", "--input", "nowhere", "--output", "data"], "comera: --input nowhere does not exist; check its name"),
        (["preprocess", "--input", "loop", "--output", "data"], "cannot read --input loop: Too many levels of symbolic links"),
        (["preprocess", "--input", "bad.tsv", "--output", "loop"], "--output loop leads to a symbolic link to itself"),
        (["preprocess", "--input", "x" * 300, "--output", "data"], "File name too long"),
        (["transform", "--data", "loop", "--input", "bad.tsv", "--output", "data"], "loop"),
        (["inspect", "--data", "loop"], "loop"),
        (["preprocess", "--input", "bad.tsv", "--output", "data", "--min-count", "C3=few"], "comera: --min-count is 'C3=few'"),
        (["preprocess", "--input", "bad.tsv", "--output", "data", "--memory-limit", "much"], "'much' is not a size; write it"),
        (["preprocess", "--input", "bad.tsv", "--output", "data", "--schema", "no.toml"], "comera: --schema no.toml does not"),
        (["preprocess", "--input", "bad.tsv", "--input", "bad.tsv", "bad.tsv", "--output", "data"], "name all files after one"),
    ],
)
def test_mistakes(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.tsv").write_text("not a log\n")
    Path("loop").symlink_to("loop")
    assert run(*arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.tsv", "loop"]


def test_nobody_needs_to_read_standard_error(log: Path, tmp_path: Path) -> None:
    """It is closed, or a pipe that nobody reads; the second run says that it resumes."""
    with log.open("a") as file:
        file.write("not a row\n")
    reader, writer = os.pipe()
    os.close(reader)
    command = f"-m comera_rec preprocess --input {log} --output {tmp_path / 'data'} --part-size 10KiB"
    program = [sys.executable, *command.split()]
    closed = subprocess.run([*program, "--workers", "1"], preexec_fn=lambda: os.close(2))
    assert closed.returncode == 2
    assert subprocess.run([*program, "--max-bad-rows", "1"], stderr=writer).returncode == 0
    os.close(writer)


def test_logs_are_ordered_by_their_numbers(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """day_10 is before day_2 in a shell's order, and in that of patterns, so the last file would not be the last day.

    Logs may all follow one --input, as the shell expands day_*, amid other options, or each its own --input.
    """
    days = [str(log.parent / f"day_{day}") for day in (0, 10, 2)]
    for day in days:
        shutil.copy(log, day)
    expanded, each = ["--input", *days, "--min-count", 3], [part for day in days[::-1] for part in ("--input", day)]
    for name, inputs in (("expanded", expanded), ("pattern", ["--input", log.parent / "day_*"]), ("each", each)):
        assert run("preprocess", "--max-bad-rows", 1, *inputs, "--output", tmp_path / name, "--split", "day") == 0
        ordered = ["day_2", "day_10", "day_0"] if name == "each" else ["day_0", "day_2", "day_10"]
        assert [file.name for file in read_manifest(tmp_path / name).inputs] == ordered
        told = "" if name == "each" else f"reading the logs in the order of their numbers: {days[0]} ... {days[1]}\n"
        assert capsys.readouterr().err == told
    assert run("preprocess", "--input", log.parent / "night_*", "--output", tmp_path / "none") == 2
    assert "night_* matches no file; check its name" in capsys.readouterr().err


def test_new_logs_of_another_source_are_pointed_out(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("preprocess", "--input", log, "--output", tmp_path / "data", "--min-count", "1") == 0
    other = tmp_path / "other.txt"
    assert run("synth", "--rows", "500", "--scale", "0.01", "--seed", "77", "--output", other) == 0
    capsys.readouterr()
    for name, new, strange in (("same", log, False), ("new", other, True)):
        assert run("transform", "--data", tmp_path / "data", "--input", new, "--output", tmp_path / name) == 0
        assert ("most values of C1, C2" in capsys.readouterr().err) is strange


def test_empty_splits_are_pointed_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.csv").write_text("".join(f"{day % 2},2026-01-{day:02},{day % 3}\n" for day in range(1, 29)))
    (tmp_path / "schema.toml").write_text('separator = ","\n[columns]\nlabel = "label"\nday = "time"\nshop = "category"\n')
    times = ("--split", "time", "--val-from", "2026-01-20T06:00+06:00", "--test-from", "2027-01-01")
    run("preprocess", "--input", tmp_path / "log.csv", "--schema", tmp_path / "schema.toml", "--output", tmp_path / "data", *times)
    assert "\n  no row is in test\n" in capsys.readouterr().out
    assert read_manifest(tmp_path / "data").splits["train"].rows == 19, "the time has the zone that it states"


def test_columns_without_values_are_pointed_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.jsonl").write_text("".join(f'{{"y": {n % 2}, "shop": {n % 3}}}\n' for n in range(40)))
    (tmp_path / "schema.toml").write_text('format = "jsonl"\n[columns]\ny = "label"\nshop = "category"\nprise = "float"\n')
    run("preprocess", "--input", tmp_path / "log.jsonl", "--schema", tmp_path / "schema.toml", "--output", tmp_path / "data")
    assert "\nno row has a value of prise\n" in capsys.readouterr().out
