"""Each kind of bad input, option or output gives one clear line that says what to do, and leaves nothing behind.

Inputs are never destroyed, links are followed, and runs don't write to the same place.
"""

import bz2
import errno
import gzip
import lzma
import multiprocessing
import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from random_logs import make, random_rows, to_text
from refusals import refuse

from data_pipeline import atomic
from data_pipeline import preprocess as preprocess_module
from data_pipeline.manifest import MANIFEST_NAME, read_manifest
from data_pipeline.preprocess import PreprocessOptions, preprocess
from data_pipeline.schema import read_schema
from data_pipeline.transform import TransformOptions
from data_pipeline.work import work_folder
from data_pipeline.write_pass import write_logs

WriteLog = Callable[..., Path]
ROWS = random_rows(30)
GZIPPED = gzip.compress(to_text(ROWS))


def with_cell(position: int, cell: str) -> bytes:
    """The rows as text, with one cell of line 17 replaced."""
    rows = [list(row) for row in ROWS]
    rows[16][position] = cell
    return to_text(rows)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (to_text(ROWS[:4]) + b"1\t2\t3\n", r"log.tsv:5: 3 columns where 40 are expected; fix the log, or .* `max_bad_rows`"),
        (to_text(ROWS[:4]) + b"\n" + to_text(ROWS), "log.tsv:5: blank line"),
        (with_cell(20, "xyz"), "log.tsv:17: C7 'xyz' is not 1 to 8 hex digits"),
        (with_cell(20, "é" * 60), r"log.tsv:17: C7 '(\\xc3\\xa9){20}' is not"),
        (with_cell(20, "a\x0bb\x1c"), r"log.tsv:17: C7 'a\\x0bb\\x1c' is not"),
        (to_text([row[:-1] for row in ROWS]), "log.tsv:1: a label and 38 other columns: the last is missing; Criteo logs have 40"),
        (b"a,b,c\n1,2,3\n", "log.tsv:1: 1 columns; Criteo logs have 40"),
        (b"x" * (1 << 21), "log.tsv: a line is longer than 1048576 bytes"),
        (b"", "log.tsv is empty"),
        (gzip.compress(b"", mtime=0), "log.tsv is empty"),
        (GZIPPED[:-10], "log.tsv: damaged gzip .*fetch or compress it again"),
        (GZIPPED[:40] + b"\0\0\0\0" + GZIPPED[44:], "log.tsv: damaged gzip"),
        (GZIPPED + b"no gzip", "log.tsv: damaged gzip"),
        (bz2.compress(to_text(ROWS))[:60], "log.tsv: damaged bzip2"),
        (bz2.compress(to_text(ROWS)) + bz2.compress(to_text(ROWS))[:60] + b"\0" * 60, "log.tsv: damaged bzip2"),
        (bz2.compress(to_text(ROWS)) + b"no bz2", "log.tsv: damaged bzip2"),
        (lzma.compress(to_text(ROWS)) + lzma.compress(to_text(ROWS))[:60] + b"\0" * 60, "log.tsv: damaged xz"),
        (lzma.compress(to_text(ROWS)) + lzma.compress(to_text(ROWS))[:60], "log.tsv: damaged xz"),
        (b"PK\3\4\x14\0\0\0", "log.tsv is a zip archive; give text in UTF-8, plain or compressed by .*, or Parquet"),
        ("1\t2\n".encode("utf-16"), "log.tsv is text in UTF-16; give text in UTF-8"),
        (b"\xfe\xff\x001", "log.tsv is text in UTF-16"),
    ],
)
def test_content(tmp_path: Path, write_log: WriteLog, content: bytes, message: str) -> None:
    log = write_log(content)
    refuse(message, make, log, tmp_path / "data")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pipe", r"`input` .*pipe is a pipe or a device, and logs are read twice; write it to a file"),
        ("nowhere.tsv", r"`input` .*nowhere.tsv does not exist"),
        ("donn\udce9es.tsv", r"`input` 'donn\\udce9es.tsv' is not UTF-8; rename it"),
        (".", "is a folder; name the files in it"),
        ("memory://nowhere", "`input` memory://nowhere does not exist; check its name"),
        ("memory://logs", "`input` memory://logs is a folder; name the files in it, such as memory://logs/day_"),
        ("memory://empty", "`input` memory://empty is empty"),
        ("nosuch://log", "`input` nosuch://log: Protocol not known: nosuch"),
    ],
)
def test_what_is_no_log(tmp_path: Path, memory: Any, name: str, message: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    memory.pipe({"/logs/day_0": b"x", "/empty": b""})
    refuse(message, make, name if "://" in name else tmp_path / name, tmp_path / "data")
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_malformed_lines_up_to_a_limit(tmp_path: Path, write_log: WriteLog) -> None:
    good = to_text(ROWS)
    log = write_log(b"bad\n" + good + b"worse\n\n" + good)
    refuse("log.tsv:1: .*; it is the first of more than 2 malformed lines; fix", make, log, tmp_path / "data", max_bad_rows=2)
    make(log, tmp_path / "data", max_bad_rows=3, part_bytes=400)
    bad = write_log([["x"] * 40] * 3, "bad.tsv")
    refuse("`input` holds 0 well-formed lines, which leaves no row for training", make, bad, tmp_path / "no", max_bad_rows=9)
    manifest = read_manifest(tmp_path / "data")
    assert (manifest.rows.read, manifest.rows.written, manifest.rows.rejected) == (63, 60, 3)
    (file,) = manifest.inputs
    assert (file.name, file.bytes, file.rows_in, file.rows_rejected) == ("log.tsv", log.stat().st_size, 63, 3)
    assert str(tmp_path) not in (tmp_path / "data" / "manifest.json").read_text()
    assert [line.line for line in manifest.rejected_lines] == [1, 32, 33]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_blank_last_line_is_no_row(tmp_path: Path, write_log: WriteLog, end: str) -> None:
    """Wherever the last part begins; more blank lines are malformed."""
    text = to_text(ROWS).replace(b"\n", end.encode())
    for number, (name, part_bytes) in enumerate((("log.tsv", 1 << 20), ("log.tsv", len(text)), ("log.gz", len(text) // 3))):
        make(write_log(text + end.encode(), name), tmp_path / str(number), part_bytes=part_bytes)
        assert read_manifest(tmp_path / str(number)).rows.read == 30
    refuse(r"log.tsv:31: blank line", make, write_log(text + 2 * end.encode()), tmp_path / "data")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_count": 0}, "`min_count` is 0; it must be at least 1"),
        ({"hash_buckets": 1}, "`hash_buckets` is 1; it must be at least 2"),
        ({"hash_buckets": 9, "order": "similarity"}, "`order` similarity needs values that are counted"),
        ({"min_counts": {"C3": 0}}, "`min_count` C3=0: it must be at least 1"),
        ({"split": "weekly"}, "`split` is 'weekly'; choose one of chronological, day, random, time"),
        ({"seed": 1 << 64}, r"`seed` is 18446744073709551616; it must be below 2\*\*64"),
        ({"split": "day"}, "`split` day needs several logs"),
        ({"split": "time"}, "`split` time needs `val_from` and `test_from`; give both, with `val_from` no later than"),
        ({"split": "time", "val_from": 2.0, "test_from": 1.0}, "`split` time needs `val_from` and `test_from`"),
        ({"val_from": 1.0, "test_from": 2.0}, "`val_from` and `test_from` need `split` time"),
        ({"memory_limit": 400 << 20}, "`memory_limit` 400 MiB is too little for parts of 16 MiB, which need 512 MiB; raise it"),
        ({"memory_limit": 1000}, "`memory_limit` 1000 bytes is too little for parts of 16 MiB, .*; raise it, as any parts need"),
        ({"max_bad_rows": -1}, "`max_bad_rows` is -1; it must be at least 0"),
        ({"test_fraction": float("nan")}, "`test_fraction` is nan"),
        ({"val_fraction": 0.5, "test_fraction": 0.5}, "leave no training rows; their sum must be below 1"),
    ],
)
def test_options(tmp_path: Path, options: dict[str, float], message: str) -> None:
    refuse(message, make, tmp_path / "log.tsv", tmp_path / "data", **options)


def test_finished_data_set_is_kept_unless_overwritten(tmp_path: Path, write_log: WriteLog) -> None:
    log, output = write_log(ROWS), tmp_path / "data"
    make(log, output)
    before = (output / "manifest.json").read_bytes()
    refuse("already holds a finished result; add `overwrite`", make, log, output, min_count=1)
    refuse("blank line", make, write_log(b"\n" + to_text(ROWS), "bad.tsv"), output, overwrite=True)
    refuse("`min_count` C27=.*: no such categorical column; choose", make, log, output, min_counts={"C27": 3}, overwrite=True)
    assert (output / "manifest.json").read_bytes() == before
    make(log, output, min_count=1, overwrite=True)
    assert read_manifest(output).options["min_count"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.tsv", "data", "log.tsv"]


def test_foreign_folder_is_never_touched(tmp_path: Path, write_log: WriteLog) -> None:
    output = tmp_path / "photos"
    output.mkdir()
    (output / "cat.jpg").write_bytes(b"meow")
    refuse("exists and holds something else; choose a new or empty folder", make, write_log(ROWS), output, overwrite=True)
    assert [path.name for path in output.iterdir()] == ["cat.jpg"]


def test_unwritable_output(tmp_path: Path, write_log: WriteLog) -> None:
    log = write_log(ROWS)
    with pytest.raises(OSError, match=r"cannot write `output` .*data: Not a directory; choose a writable place"):
        make(log, log / "data")
    with (
        pytest.raises(OSError, match=r"data: Too many open files; raise the limit \(`ulimit -n`\), and run the same command again"),
        work_folder(tmp_path / "data", identity={}, files=(MANIFEST_NAME,), overwrite=False, tell=print),
    ):
        raise OSError(errno.EMFILE, "")
    assert list(tmp_path.iterdir()) == [log]


def test_input_that_changes_during_the_run(tmp_path: Path, write_log: WriteLog, monkeypatch: pytest.MonkeyPatch) -> None:
    log = write_log(ROWS)

    def change(*arguments: object) -> dict:
        with log.open("ab") as file:
            file.write(to_text(ROWS[:1]))
        return write_logs(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(preprocess_module, "write_logs", change)
    refuse("an `input` changed while it was read; run the same command again to start over", make, log, tmp_path / "data")
    assert not (tmp_path / "data").exists()
    monkeypatch.undo()
    make(log, tmp_path / "data")
    assert read_manifest(tmp_path / "data").rows.written == 31


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[columns", "Expected"),
        ("\ufeff[columns]\n", "it needs a table [columns]"),
        ("colums = 1", "colums is unknown; choose from columns, format, header, missing, separator"),
        ('[columns]\na = "number"', "a: kind 'number' is unknown; choose one of ignore, label, integer, hex, category, list"),
        ('[columns]\na = { kind = "list", sep = "|" }', "a: sep is unknown; choose from column, hash_buckets, kind, max_length"),
        ("[columns]\na = 3", "a: write its kind, one of ignore"),
        ('[columns]\na = "weight"\nb = "weight"', "columns a, b are all weights; there can be only one"),
        ('header = "false"\n[columns]\na = "integer"', "header is 'false'; write true or false, without quotes"),
        (f'[columns]\n{"a" * 200} = "integer"', "aaaaa... has a name that is too long for its files; rename it"),
        ('format = "xml"\n[columns]\na = "integer"', "format 'xml' is unknown; choose one of text, csv, jsonl"),
        ('[columns]\na = { kind = "float", transform = "sqrt" }', "a: transform 'sqrt' is unknown; choose one of log, stan"),
        ('[columns]\na = { kind = "hex", transform = "log" }', ": transform is unknown; choose from column, hash_buckets"),
        ('[columns]\na = { kind = "hex", hash_buckets = 1 }', "a: hash_buckets is 1; it must be an integer from 2 to 2**31"),
        ('[columns]\na = { kind = "list", max_length = true }', "a: max_length is True; it must be an integer from 1"),
        ('missing = "NA"\n[columns]\na = "hex"', "missing is 'NA'; write a list of texts"),
        ('[columns]\na = "label"', "there is nothing to learn from"),
        ('[columns]\n"" = "integer"', "a column's name is empty"),
        ('[columns]\nlabel = "integer"', "column label is of kind integer; the name is reserved for the label"),
        ('separator = "."\n[columns]\na = "integer"', r"separator '.' must be one ASCII character, not a letter, a digit or one"),
        ('separator = "|"\n[columns]\na = "list"', "a: '|' cannot separate both columns and elements"),
    ],
)
def test_bad_schemas(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "schema.toml").write_text(text)
    refuse(r"^`schema` .*schema.toml: .*" + re.escape(message), read_schema, tmp_path / "schema.toml")


@pytest.fixture
def options(tmp_path: Path, write_log: WriteLog) -> PreprocessOptions:
    return PreprocessOptions(inputs=(write_log(ROWS),), output=tmp_path / "data")


def test_inputs_and_data_in_the_output_stay(options: PreprocessOptions, tmp_path: Path) -> None:
    preprocess(options)
    data, link, inside = options.output, tmp_path / "link", options.output / "today.tsv"
    inside.write_bytes(to_text(ROWS))
    link.symlink_to(data)
    for output, log in ((data, inside), (link, inside), (data, link / "today.tsv")):
        refuse("`output` .* and `input` .*today.tsv overlap; choose another `output`", make, log, output, overwrite=True)
    for output, known in ((data, link), (link, data), (data / "new", data)):
        with pytest.raises(ValueError, match=r"`output` .* and `data` .* overlap; choose another `output`"):
            TransformOptions(inputs=options.inputs, data=known, output=output, overwrite=True)
    assert inside.read_bytes() == to_text(ROWS)


@pytest.mark.parametrize("name", ["run/checkpoint.pt", "train/model.ckpt", "link"])
def test_other_files_in_the_output_stay(data: Path, options: PreprocessOptions, name: str) -> None:
    precious = data / name
    precious.parent.mkdir(exist_ok=True)
    precious.symlink_to(options.inputs[0]) if name == "link" else precious.write_text("precious")
    refuse(f"`output` .*data also holds {name}, which is not part of it; move", preprocess, replace(options, overwrite=True))
    assert precious.exists()


def test_output_behind_a_link(options: PreprocessOptions, tmp_path: Path) -> None:
    """The link stays, and the data set is written to its target, on the target's file system."""
    (tmp_path / "disk").mkdir()
    options.output.symlink_to(tmp_path / "disk" / "data")
    for overwrite in (False, True):
        preprocess(replace(options, overwrite=overwrite))
        assert options.output.is_symlink()
        assert read_manifest(tmp_path / "disk" / "data").rows.written == 30
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["data"]


def test_urls_and_mounts_are_refused_as_output(options: PreprocessOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for output, message in (
        ("s3://bucket/data", "s3:/bucket/data is a URL, which this command can't write to; write to a local"),
        ("/proc", "/proc is a mount point; name a folder in it, such as /proc/d"),
        ("/dev/null", "/dev/null is a pipe or a device; name a regular file or a folder"),
        (".", ". holds the current folder, which would be replaced"),
    ):
        refuse(f"`output` {message}", lambda output=output: preprocess(replace(options, output=Path(output))))
    with pytest.raises(ValueError, match=r"`input` gs://bucket/log: .*; run pip install s3fs for s3://, gcsfs for gs://"):
        preprocess(replace(options, inputs=("gs://bucket/log",)))
    assert [path.name for path in tmp_path.iterdir()] == ["log.tsv"]


def test_one_log_under_two_names(options: PreprocessOptions, tmp_path: Path) -> None:
    log = options.inputs[0]
    (tmp_path / "soft").symlink_to(log)
    (tmp_path / "hard").hardlink_to(log)
    for other in (log, tmp_path / "soft", tmp_path / "hard", f"file://{log}"):
        message = f"`input` .*{Path(other).name} and .*log.tsv are the same file; give each log once"
        refuse(message, replace, options, inputs=(log, other))
    replace(options, inputs=("https://a.b/get?day=0", "https://a.b/get?day=1"))


def _hold(output: Path, ready: object) -> None:
    with work_folder(output, identity={}, files=(MANIFEST_NAME,), overwrite=False, tell=print):
        ready.set()  # type: ignore[attr-defined]
        signal.pause()


def test_lock_of_a_process(options: PreprocessOptions) -> None:
    """It lasts as long as its process."""
    context = multiprocessing.get_context("forkserver")
    ready = context.Event()
    process = context.Process(target=_hold, args=(options.output, ready))
    process.start()
    assert ready.wait(60)
    refuse(r"`output` .*data is being written by another process; wait for it or choose another", preprocess, options)
    process.kill()
    process.join()
    preprocess(options)
    assert not [path.name for path in options.output.parent.iterdir() if path.name.startswith(".")]


def test_everything_is_synced_before_it_is_renamed(options: PreprocessOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[str] = set()
    sync = os.fsync

    def note(descriptor: int) -> None:
        synced.add(re.sub(r"\.([^/]*)\.[0-9a-f]{32}\.tmp$", r"\1", os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    monkeypatch.setattr(atomic.os, "fsync", note)
    preprocess(options)
    work = options.output.with_name(".data.partial")
    written = {re.sub("^[0-9a-f]{32}/", "", os.path.relpath(path, work)) for path in synced}
    assert {
        str(Path("data") / path.relative_to(options.output)) for path in (options.output, *options.output.rglob("*"))
    } <= written
    assert str(options.output.parent) in synced
