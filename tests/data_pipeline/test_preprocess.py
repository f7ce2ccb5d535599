"""Logs are cut into parts at any byte and into splits as by a few lines of Python; threads and room change nothing.

New logs are encoded like the data set's rows, and the result is a data set like any other.
"""

import itertools
import os
import resource
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from consistency import verify
from random_logs import ROWS, files_of, make, random_rows, read, schema_of, to_text
from refusals import refuse

from data_pipeline import parts, runs, shards
from data_pipeline.manifest import SPLITS, Manifest, file_sha256, read_manifest
from data_pipeline.parts import count_parts, read_parts
from data_pipeline.preprocess import PreprocessOptions, preprocess
from data_pipeline.schema import criteo_schema, read_schema
from data_pipeline.splits import Splitting
from data_pipeline.transform import TransformOptions, transform

WriteLog = Callable[..., Path]
START = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
VISITS = schema_of({"click": "label", "when": "time", "who": "ignore", "page": "category"}, header=True, format="csv")


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("name", ["log.tsv", "log.gz"])
def test_cut_at_every_byte(write_log: WriteLog, name: str, ended: bool) -> None:
    """For every part size, each line is read once, in order, in the part where it starts, whichever way lines end."""
    rows = random_rows(4)
    text = to_text(rows[:2], "\r\n") + to_text(rows[2:])
    log = write_log(text if ended else text[:-1], name)
    for part_bytes in range(1, len(text) + 2):
        cut = list(read_parts(0, log, part_bytes=part_bytes, skip=lambda number: False))
        assert b"".join(part.content for part in cut) == text
        assert [part.number for part in cut if part.last] == [len(cut) - 1]
        assert count_parts(log, part_bytes) == (len(cut) if name == "log.tsv" else None)
        for part in cut:
            assert text[part.start :].startswith(part.content)
            assert not part.content or part.number * part_bytes <= part.start < (part.number + 1) * part_bytes
        assert list(read_parts(0, log, part_bytes=part_bytes, skip=lambda number: number % 2 == 0)) == cut[1::2]


@pytest.mark.parametrize("part_bytes", [1, 100, 499, 500, 501, 1000, 5000])
@pytest.mark.parametrize("name", ["log.tsv", "log.gz"])
def test_longest_line_whatever_the_parts(write_log: WriteLog, monkeypatch: pytest.MonkeyPatch, name: str, part_bytes: int) -> None:
    monkeypatch.setattr(parts, "LONGEST_LINE", 500)
    for before in range(3):
        for length, newline in itertools.product((500, 501), (b"\n", b"")):
            text = b"a\n" * before * 150 + b"x" * length + newline
            log = write_log(text, name)
            if length == 500:
                cut = list(read_parts(0, log, part_bytes=part_bytes, skip=lambda number: False))
                assert b"".join(part.content for part in cut) == text.removesuffix(b"\n") + b"\n"
            else:
                with pytest.raises(ValueError, match=f"{name}: a line is longer than 500 bytes; check that this is a click log"):
                    list(read_parts(0, log, part_bytes=part_bytes, skip=lambda number: False))


def test_many_parts_with_few_files(
    tmp_path: Path, write_log: WriteLog, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Hundreds of parts, merged in levels, give the same data set as when merged at once."""
    log, limits = write_log(random_rows(300)), resource.getrlimit(resource.RLIMIT_NOFILE)
    at_once = make(log, tmp_path / "at once", part_bytes=600, workers=2)
    monkeypatch.setattr(runs, "FAN_IN", 8)
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits))
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 40, limits[1]))
    manifest = make(log, tmp_path / "data", part_bytes=600, workers=2)
    assert sum(len(split.shards) for split in manifest.splits.values()) >= 80
    assert manifest == at_once


def test_by_random_draw(tmp_path: Path, write_log: WriteLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's split depends only on the seed and the row's position, whatever the parts, threads, row groups and memory."""
    rows = random_rows(3000)
    log = write_log(rows)
    starts = np.cumsum([0, *(len(line) for line in to_text(rows).splitlines(keepends=True))])[:-1]
    drawn = Splitting(split="random", seed=5).drawn(0, starts)
    verify(make(log, tmp_path / "a", split="random", seed=5, workers=1), tmp_path / "a")
    monkeypatch.setattr(shards, "ROW_GROUP_ROWS", 30)
    monkeypatch.setattr(PreprocessOptions, "table_bytes", 4000)  # vocabularies are freed while they are read
    verify(make(log, tmp_path / "b", split="random", seed=5, workers=3, part_bytes=50_000), tmp_path / "b")
    assert max(pq.read_metadata(path).row_group(0).num_rows for path in (tmp_path / "b" / "train").iterdir()) == 30
    for number, split in enumerate(("train", "val", "test")):
        split_rows = read(tmp_path / "a", split)
        pd.testing.assert_frame_equal(split_rows, read(tmp_path / "b", split))
        assert split_rows["label"].tolist() == [int(rows[i][0]) for i in np.flatnonzero(drawn == number)]


def test_shares_are_those_asked_for() -> None:
    """Shares of 100,000 rows are right within 5 standard deviations; other seeds or logs give other draws."""
    starts = np.arange(0, 24_000_000, 240)
    drawn, uneven = (Splitting(split="random", **how).drawn(0, starts) for how in ({}, {"val_fraction": 0.0, "test_fraction": 0.5}))
    for splits, shares in ((drawn, [0.8, 0.1, 0.1]), (uneven, [0.5, 0, 0.5])):
        np.testing.assert_allclose(np.bincount(splits, minlength=3) / len(splits), shares, atol=0.008)
    for other in (Splitting(split="random", seed=1).drawn(0, starts), Splitting(split="random").drawn(1, starts)):
        assert (drawn == other).mean() == pytest.approx(0.66, abs=0.01)
    assert [Splitting(split=split).bounds([2, 1]) for split in SPLITS] == [(3, 3), (0, 3), (0, 0)]
    assert Splitting(split="day").bounds([200, 100, 51]) == (300, 326)
    assert Splitting(val_fraction=0.29).bounds([100]) == (61, 90)  # though 0.29 * 100 is 28.999999999999996


@pytest.fixture
def visits(tmp_path: Path) -> PreprocessOptions:
    """1000 visits of 40 users in random order of time, ten per day from 2026-01-01 on."""
    draw = np.random.default_rng(1)
    days = draw.permutation(np.repeat(np.datetime64("2026-01-01") + np.arange(100), 10))
    rows = [f"{draw.integers(2)},{day},u{draw.integers(40)},{number}" for number, day in enumerate(days)]
    (tmp_path / "visits.csv").write_text("\n".join(["click,when,who,page", *rows]) + "\n")
    inputs, output = (tmp_path / "visits.csv",), tmp_path / "by time"
    times = {"val_from": START + 80 * 86400, "test_from": START + 90 * 86400}
    return PreprocessOptions(inputs=inputs, output=output, schema=VISITS, split="time", part_bytes=3000, min_count=1, **times)


@pytest.mark.parametrize("days", [(80, 90), (30, 40), (69, 69), (100, 100)])
def test_by_time(visits: PreprocessOptions, days: tuple[int, int]) -> None:
    """Each day is in one split, earlier days in training; rows keep the log's order."""
    val_from, test_from = (START + 86400 * day for day in days)
    options = replace(visits, val_from=val_from, test_from=test_from)
    manifest = preprocess(options)
    verify(manifest, options.output)
    frame = pd.read_csv(str(options.inputs[0]), parse_dates=["when"])
    day = (frame["when"] - pd.Timestamp("2026-01-01")).dt.days
    for split, chosen in {"train": day < days[0], "val": (day >= days[0]) & (day < days[1]), "test": day >= days[1]}.items():
        assert manifest.splits[split].rows == chosen.sum()
        if chosen.any():
            assert read(options.output, split)["label"].tolist() == frame["click"][chosen].tolist()
    assert (manifest.options["val_from"], manifest.options["test_from"]) == (val_from, test_from)


def test_new_rows_are_split_at_the_same_times(visits: PreprocessOptions, tmp_path: Path) -> None:
    preprocess(visits)
    (tmp_path / "today.csv").write_text("when,who,page\n2026-01-05,u,1\n2026-03-25T10:00,u,1\n2027-01-01T00:00:00.5Z,u,1\n")
    options = TransformOptions(inputs=(tmp_path / "today.csv",), data=visits.output, output=tmp_path / "new")
    new = transform(options)
    assert [split.rows for split in new.splits.values()] == [1, 1, 1]
    (tmp_path / "today.csv").write_text("who,page\nu,1\n")
    other = replace(options, output=tmp_path / "other")
    refuse("`split` time needs a column of kind time; name one in `schema`", transform, other)


def test_times_are_read_only_where_rows_are_split_by_them(visits: PreprocessOptions, tmp_path: Path) -> None:
    (tmp_path / "visits.csv").write_text("click,when,who,page\n1,11/7/2017 9:30,u,1\n" + "0,,u,1\n" * 9)
    refuse("when '11/7/2017 9:30' is not a time in ISO 8601", preprocess, visits)
    manifest = preprocess(replace(visits, split="chronological", val_from=None, test_from=None))
    assert manifest.rows.written == 10
    new = transform(TransformOptions(inputs=(tmp_path / "visits.csv",), data=visits.output, output=tmp_path / "new"))
    assert new.rows.written == 10


def test_labels_return_after_a_day_without_them(visits: PreprocessOptions, tmp_path: Path) -> None:
    preprocess(replace(visits, split="chronological", val_from=None, test_from=None))
    labeled, unlabeled = tmp_path / "visits.csv", tmp_path / "unlabeled.csv"
    unlabeled.write_text("who,page\nu,1\n")
    for first, second in ((labeled, unlabeled), (unlabeled, labeled)):
        options = TransformOptions(inputs=(first, second), data=visits.output, output=tmp_path / "both")
        refuse(f"`input` {second} has other labels, weights or times than {first}; transform them separately", transform, options)
    assert not transform(replace(options, inputs=(unlabeled,), output=tmp_path / "day1")).labels
    assert transform(replace(options, inputs=(labeled,), data=tmp_path / "day1", output=tmp_path / "day2")).labels


def to_options(data: Path, *logs: Path, **others: object) -> TransformOptions:
    return TransformOptions(inputs=logs, data=data, output=data.parent / "new", **others)  # type: ignore[arg-type]


def checked(options: TransformOptions) -> Manifest:
    """Run a transform and verify its data set; return the manifest."""
    manifest = transform(options)
    verify(manifest, options.output)
    assert read_manifest(options.output) == manifest
    return manifest


def test_transforming_the_original_rows_reproduces_them(data: Path, write_log: WriteLog) -> None:
    """They are split as before, whatever the parts; the manifest differs in what new rows alone don't determine."""
    manifest, source = checked(to_options(data, write_log(ROWS, "again.gz"), part_bytes=7_000)), read_manifest(data)
    for split in ("train", "val", "test"):
        pd.testing.assert_frame_equal(read(data.parent / "new", split), read(data, split))
    assert manifest.transformed.data == str(data)
    assert manifest.transformed.manifest_sha256 == file_sha256(data / "manifest.json")
    assert manifest.integer_columns == source.integer_columns
    assert manifest.categorical_columns == tuple(replace(column, distinct=None) for column in source.categorical_columns)
    assert manifest.label == source.label


def test_refused(data: Path, write_log: WriteLog) -> None:
    log = write_log(ROWS[:3], "new.tsv")
    refuse("`split` is 'all'; choose one of source, train, val, test", to_options, data, log, split="all")
    short = write_log(b"1\t2\n", "short.tsv")
    criteo = criteo_schema(labeled=True)
    renamed = replace(criteo, columns=(criteo.columns[0], replace(criteo.columns[1], name="J1"), *criteo.columns[2:]))
    refuse(r"data: J1 \(integer\) where I1 \(integer\) is expected", transform, to_options(data, log, schema=renamed))
    malformed = to_options(data, short, schema=criteo, max_bad_rows=5)
    refuse("holds no well-formed lines; give logs with rows to encode", transform, malformed)
    (data / "vocabulary" / "C7.table").unlink()
    refuse(r"C7\.table does not exist, but the manifest lists it", transform, to_options(data, log))
    assert not (data.parent / "new").exists()


def test_extended(data: Path, write_log: WriteLog) -> None:
    """Known values keep their ids, and new ones of the training split get the next ids by count unless rare, day after day."""
    source = read_manifest(data)
    first = source.categorical_columns[0]
    new = [["1", *["3"] * 13, code, *["0"] * 25] for code in ["aaaa0001"] * 2 + ["aaaa0002"] * 5 + ["aaaa0003"] + ["aaaa0000"] * 2]
    log = write_log([*ROWS[:320], *new], "new.tsv")
    options = to_options(data, log, split="train", extend=True, part_bytes=20_000)
    manifest = checked(options)
    column = manifest.categorical_columns[0]
    assert (column.num_embeddings, column.grown) == (first.num_embeddings + 3, (first.num_embeddings,))
    rows = read(options.output, "train")
    pd.testing.assert_frame_equal(rows.loc[:319, "C2":], read(data, "train").loc[:, "C2":])  # type: ignore[misc]
    known = read(data, "train")["C1"]
    assert (rows["C1"][:320][known > 0] == known[known > 0]).all()
    ends = [first.num_embeddings + row for row in (0, 1, 2)]  # by count, then by value
    assert rows["C1"][320:].tolist() == [ends[2]] * 2 + [ends[0]] * 5 + [0] + [ends[1]] * 2
    words, before = (pd.read_parquet(folder / "vocabulary" / "C1.parquet") for folder in (options.output, data))
    pd.testing.assert_frame_equal(words[: len(before)], before)
    assert words["count"][len(before) :].tolist() == [5, 2, 2]
    unchanged = manifest.categorical_columns[1]
    assert (unchanged.vocabulary, unchanged.grown) == (source.categorical_columns[1].vocabulary, ())
    more = write_log([["1", *["3"] * 13, "bbbb0001", *["0"] * 25]] * 3, "more.tsv")
    tomorrow = replace(options, data=options.output, output=data.parent / "tomorrow", inputs=(more,))
    again = checked(tomorrow).categorical_columns[0]
    assert (again.num_embeddings, again.grown) == (column.num_embeddings + 1, (first.num_embeddings, column.num_embeddings))
    tested = checked(replace(options, split="test", output=data.parent / "tested"))
    assert tested.categorical_columns[0].grown == ()


def test_extended_run_resumes(data: Path, write_log: WriteLog, monkeypatch: pytest.MonkeyPatch) -> None:
    new = random_rows(200, seed=9)
    options = to_options(data, write_log(new * 2, "new.tsv"), extend=True, part_bytes=9_000)
    monkeypatch.setattr("data_pipeline.transform.write_logs", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        transform(options)
    monkeypatch.undo()
    checked(options)
    whole = replace(options, output=data.parent / "whole")
    checked(whole)
    assert files_of(options.output) == files_of(whole.output)


SCHEMA = """
separator = ","
header = true
[columns]
click = "label"
buy = "label"
w = "weight"
rating = { kind = "float", transform = "standardize" }
seen = { kind = "list", max_length = 2 }
user = { kind = "category", hash_buckets = 50 }
"""


def test_other_columns_and_settings_are_refused(tmp_path: Path) -> None:
    """They would give numbers that differ from those that the model was trained on; labels are all there or none."""
    log, data, schema = tmp_path / "log.csv", tmp_path / "data", tmp_path / "schema.toml"
    schema.write_text(SCHEMA)
    log.write_text("click,buy,w,rating,seen,user\n" + "1,0,0.5,3,a|b,u\n" * 9)
    make(log, data, schema=read_schema(schema))
    for before, after, message in (
        (', transform = "standardize"', "", r"rating \(float\) where rating \(float, transform standardize\) is expected"),
        ("max_length = 2", "max_length = 3", r"seen \(list, max_length 3\) where seen \(list, max_length 2\) is expected"),
        ("hash_buckets = 50", "hash_buckets = 60", r"user \(category, hash_buckets 60\) where user \(category, hash_buckets 50\)"),
    ):
        schema.write_text(SCHEMA.replace(before, after))
        refuse(message, transform, to_options(data, log, schema=read_schema(schema)))
    log.write_text("rating,seen,user\n3,a|b,u\n")
    manifest = checked(to_options(data, log))
    assert (manifest.labels, manifest.weight) == ((), None)
    log.write_text("click,w,rating,seen,user\n1,0.5,3,a|b,u\n")
    one = replace(to_options(data, log), output=tmp_path / "one")
    refuse("log.csv has the labels label where .* has click, buy; give logs with all of these", transform, one)
