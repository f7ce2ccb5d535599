"""Splits equal those of a few lines of Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from consistency import verify
from random_logs import make, random_rows, read, to_text

from data_pipeline.preprocess import PreprocessOptions, preprocess
from data_pipeline.schema import Column, LogSchema, read_schema
from data_pipeline.splits import Splitting
from data_pipeline.transform import TransformOptions, transform

WriteLog = Callable[..., Path]


def ids_of(values: list, min_count: int = 2) -> dict:
    counts = Counter(values)
    frequent = sorted((value for value in counts if counts[value] >= min_count), key=lambda value: (-counts[value], value))
    return {value: number for number, value in enumerate(frequent, start=1)}


def test_by_day(tmp_path: Path, write_log: WriteLog) -> None:
    days = [random_rows(count, seed=count) for count in (200, 100, 51)]
    logs = tuple(write_log(rows, f"day_{i}{'.gz' * (i % 2)}") for i, rows in enumerate(days))
    options = PreprocessOptions(inputs=logs, output=tmp_path / "data", split="day", part_bytes=3000)
    manifest = preprocess(options)
    verify(manifest, options.output)
    expected = {"train": days[0] + days[1], "val": days[2][:26], "test": days[2][26:]}
    ids = ids_of([int(row[16], 16) for row in expected["train"] if row[16]])
    for split, rows in expected.items():
        written = read(options.output, split)
        assert written["label"].tolist() == [int(row[0]) for row in rows]
        assert written["C3"].tolist() == [ids.get(int(row[16], 16), 0) if row[16] else 0 for row in rows]


def test_by_random_draw(tmp_path: Path, write_log: WriteLog) -> None:
    """A row's split depends only on the seed and the row's position; vocabularies come from the training rows."""
    rows = random_rows(3000)
    log = write_log(rows)
    starts = np.cumsum([0, *(len(line) for line in to_text(rows).splitlines(keepends=True))])[:-1]
    frames = {}
    for part_bytes, name in ((50_000, "a"), (1 << 20, "b")):
        options = PreprocessOptions(inputs=(log,), output=tmp_path / name, split="random", seed=5, part_bytes=part_bytes)
        manifest = preprocess(options)
        verify(manifest, options.output)
        frames[name] = {split: read(options.output, split) for split in manifest.splits}
    drawn = Splitting(split="random", seed=5).drawn(0, starts)
    ids = ids_of([int(rows[i][14], 16) for i in np.flatnonzero(drawn == 0) if rows[i][14]])
    for number, split in enumerate(("train", "val", "test")):
        split_rows = [rows[i] for i in np.flatnonzero(drawn == number)]
        pd.testing.assert_frame_equal(frames["a"][split], frames["b"][split])
        assert frames["a"][split]["label"].tolist() == [int(row[0]) for row in split_rows]
        assert frames["a"][split]["C1"].tolist() == [ids.get(int(row[14], 16), 0) if row[14] else 0 for row in split_rows]


def test_shares_are_those_asked_for() -> None:
    """Shares of 100,000 rows are 8 : 1 : 1 within 5 standard deviations; other seeds or logs give other draws."""
    starts = np.arange(0, 24_000_000, 240)
    drawn = Splitting(split="random").drawn(0, starts)
    shares = np.bincount(drawn, minlength=3) / len(drawn)
    np.testing.assert_allclose(shares, [0.8, 0.1, 0.1], atol=0.0065)
    for other in (Splitting(split="random", seed=1).drawn(0, starts), Splitting(split="random").drawn(1, starts)):
        assert (drawn == other).mean() == pytest.approx(0.66, abs=0.01)
    assert Splitting(val_fraction=0.29).bounds([100]) == (61, 90)  # though 0.29 * 100 is 28.999999999999996
    uneven = np.bincount(Splitting(split="random", val_fraction=0.0, test_fraction=0.5).drawn(0, starts), minlength=3) / len(starts)
    np.testing.assert_allclose(uneven, [0.5, 0, 0.5], atol=0.01)


def test_a_header_that_the_schema_lacks_is_suspected(tmp_path: Path) -> None:
    (tmp_path / "orders.csv").write_text("bought,cents\n1,5\n")
    schema = LogSchema(columns=(Column(name="bought", kind="label"), Column(name="cents", kind="integer")), separator=",")
    remedy = "if it holds column names, set header = true in the schema; fix the log, or raise `max_bad_rows`"
    with pytest.raises(ValueError, match=f"orders.csv:1: .*; {remedy}"):
        make(tmp_path / "orders.csv", tmp_path / "data", schema=schema)


START = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
VISITS = """
separator = ","
header = true
[columns]
click = "label"
when = "time"
who = "ignore"
page = "category"
"""


@pytest.fixture
def visits(tmp_path: Path) -> PreprocessOptions:
    """1000 visits of 40 users in random order of time, ten per day from 2026-01-01 on."""
    draw = np.random.default_rng(1)
    days = draw.permutation(np.repeat(np.datetime64("2026-01-01") + np.arange(100), 10))
    rows = [f"{draw.integers(2)},{day},u{draw.integers(40)},{number}" for number, day in enumerate(days)]
    (tmp_path / "visits.csv").write_text("\n".join(["click,when,who,page", *rows]) + "\n")

    (tmp_path / "visits.toml").write_text(VISITS)
    schema = read_schema(tmp_path / "visits.toml")
    inputs, output = (tmp_path / "visits.csv",), tmp_path / "by time"
    times = {"val_from": START + 80 * 86400, "test_from": START + 90 * 86400}
    return PreprocessOptions(inputs=inputs, output=output, schema=schema, split="time", part_bytes=3000, min_count=1, **times)


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
    options = visits
    preprocess(options)
    (tmp_path / "today.csv").write_text("when,who,page\n2026-01-05,u,1\n2026-03-25T10:00,u,1\n2027-01-01T00:00:00.5Z,u,1\n")
    new = transform(TransformOptions(inputs=(tmp_path / "today.csv",), data=options.output, output=tmp_path / "new"))
    assert [split.rows for split in new.splits.values()] == [1, 1, 1]
    (tmp_path / "today.csv").write_text("who,page\nu,1\n")
    with pytest.raises(ValueError, match="`split` time needs a column of kind time; name one in `schema`"):
        transform(TransformOptions(inputs=(tmp_path / "today.csv",), data=options.output, output=tmp_path / "other"))


def test_times_are_read_only_where_rows_are_split_by_them(visits: PreprocessOptions, tmp_path: Path) -> None:
    options = visits
    (tmp_path / "visits.csv").write_text("click,when,who,page\n1,11/7/2017 9:30,u,1\n" + "0,,u,1\n" * 9)
    with pytest.raises(ValueError, match="when '11/7/2017 9:30' is not a time in ISO 8601"):
        preprocess(options)
    manifest = preprocess(replace(options, split="chronological", val_from=None, test_from=None))
    assert manifest.rows.written == 10
    new = transform(TransformOptions(inputs=(tmp_path / "visits.csv",), data=options.output, output=tmp_path / "new"))
    assert new.rows.written == 10
