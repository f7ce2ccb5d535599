"""Splits, logs other than Criteo's, lists and hashed ids: outputs equal those of a few lines of Python."""

from __future__ import annotations

import gzip
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_logs import random_rows, to_text

from data_pipeline.cells import to_parsed
from data_pipeline.manifest import Manifest, read_manifest
from data_pipeline.preprocess import PreprocessOptions, preprocess
from data_pipeline.reference import hash_text
from data_pipeline.schema import Column, LogSchema, read_schema
from data_pipeline.splits import SplitKind, Splitting
from data_pipeline.transform import TransformOptions, transform
from data_pipeline.verify import verify

WriteLog = Callable[..., Path]
SHOP = """
separator = ","
header = true
[columns]
id = "ignore"
bought = "label"
shop = "category"
cents = "integer"
tags = { kind = "list", separator = " " }
"""


def read_split(folder: Path, manifest: Manifest, split: str) -> pd.DataFrame:
    return pd.concat([pd.read_parquet(folder / shard.path) for shard in manifest.splits[split].shards], ignore_index=True)


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
        written = read_split(options.output, manifest, split)
        assert written["label"].tolist() == [int(row[0]) for row in rows]
        assert written["C3"].tolist() == [ids.get(int(row[16], 16), 0) if row[16] else 0 for row in rows]
    assert all(shard.from_rows[0] >= 300 for shard in manifest.splits["val"].shards if shard.from_rows)


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
        frames[name] = {split: read_split(options.output, manifest, split) for split in manifest.splits}
    drawn = Splitting(split="random", seed=5).drawn(0, starts)
    ids = ids_of([int(rows[i][14], 16) for i in np.flatnonzero(drawn == 0) if rows[i][14]])
    for number, split in enumerate(("train", "val", "test")):
        split_rows = [rows[i] for i in np.flatnonzero(drawn == number)]
        pd.testing.assert_frame_equal(frames["a"][split], frames["b"][split])
        assert frames["a"][split]["label"].tolist() == [int(row[0]) for row in split_rows]
        assert frames["a"][split]["C1"].tolist() == [ids.get(int(row[14], 16), 0) if row[14] else 0 for row in split_rows]
        low = min(int(rows[i][1]) for i in np.flatnonzero(drawn == 0) if rows[i][1])
        expected = [np.log(max(int(row[1]), low) + 2 - low) if row[1] else 0 for row in split_rows]
        np.testing.assert_allclose(frames["a"][split]["I1"], expected, rtol=1e-6)


def test_draws_are_fair() -> None:
    """Shares of 100,000 rows are 8 : 1 : 1 within 5 standard deviations; other seeds or logs give other draws."""
    starts = np.arange(0, 24_000_000, 240)
    drawn = Splitting(split="random").drawn(0, starts)
    shares = np.bincount(drawn, minlength=3) / len(drawn)
    np.testing.assert_allclose(shares, [0.8, 0.1, 0.1], atol=0.0065)
    for other in (Splitting(split="random", seed=1).drawn(0, starts), Splitting(split="random").drawn(1, starts)):
        assert (drawn == other).mean() == pytest.approx(0.66, abs=0.01)
    uneven = np.bincount(Splitting(split="random", val_fraction=0.0, test_fraction=0.5).drawn(0, starts), minlength=3) / len(starts)
    np.testing.assert_allclose(uneven, [0.5, 0, 0.5], atol=0.01)


@pytest.fixture
def shop(tmp_path: Path) -> PreprocessOptions:
    """300 orders as a gzipped CSV log with a header; the texts of categories and tags are words."""
    draw = np.random.default_rng(0)
    lines = ["id,bought,shop,cents,tags"]
    for i in range(300):
        tags = " ".join(draw.choice(["red", "blue", "größer", "x"], draw.integers(0, 4)))
        lines.append(f"{i:x},{draw.integers(2)},{draw.choice(['', 'north', 'south', f'once {i}'])},{draw.integers(-3, 900)},{tags}")
    log, schema = tmp_path / "orders.csv.gz", tmp_path / "shop.toml"
    log.write_bytes(gzip.compress(("\r\n".join(lines) + "\r\n").encode()))
    schema.write_text(SHOP)
    return PreprocessOptions(inputs=(log,), output=tmp_path / "data", schema=read_schema(schema), part_bytes=1000)


def test_other_logs_and_lists(shop: PreprocessOptions) -> None:
    manifest = preprocess(shop)
    verify(manifest, shop.output)
    cells = [line.split(",") for line in gzip.decompress(shop.inputs[0].read_bytes()).decode().split("\r\n")[1:-1]]
    shops = ids_of([hash_text(row[2].encode()) for row in cells[:240] if row[2]])
    tags = ids_of([hash_text(tag.encode()) for row in cells[:240] for tag in row[4].split()])
    low = min(int(row[3]) for row in cells[:240])
    rows = [row for split in ("train", "val", "test") for row in read_split(shop.output, manifest, split).itertuples(index=False)]
    assert rows[0]._fields == ("label", "cents", "shop", "tags")
    for row, (_, bought, shop_text, cents, tag_text) in zip(rows, cells, strict=True):
        assert row.label == int(bought)
        assert row.cents == pytest.approx(np.log(max(int(cents), low) + 2 - low), rel=1e-6)
        assert row.shop == (shops.get(hash_text(shop_text.encode()), 0) if shop_text else 0)
        assert row.tags.tolist() == [tags.get(hash_text(tag.encode()), 0) for tag in tag_text.split()]
    shop_column, tags_column = read_manifest(shop.output).categorical_columns
    assert (shop_column.num_embeddings, shop_column.is_list) == (3, False)
    assert (tags_column.num_embeddings, tags_column.is_list) == (5, True)
    assert tags_column.missing == sum(not row[4] for row in cells)
    assert shop_column.distinct == len({row[2] for row in cells if row[2]})
    assert manifest.rows.read == 300


def test_line_numbers_count_the_header(tmp_path: Path, shop: PreprocessOptions) -> None:
    shop.inputs[0].write_text("id,bought,shop,cents,tags\n1,1,a,5,x\n2,7,b,5,y\n")
    with pytest.raises(ValueError, match=r"orders.csv.gz:3: bought '7' is not 0 or 1"):
        preprocess(shop)


def test_a_header_that_the_schema_lacks_is_suspected(shop: PreprocessOptions) -> None:
    assert shop.schema is not None
    remedy = "if it holds column names, set header = true in the schema; else fix the log, or raise `max_bad_rows`"
    with pytest.raises(ValueError, match=f"orders.csv.gz:1: .*; {remedy}"):
        preprocess(replace(shop, schema=replace(shop.schema, header=False)))


def test_min_count_of_one_column(tmp_path: Path, write_log: WriteLog) -> None:
    rows = random_rows(500)
    options = PreprocessOptions(inputs=(write_log(rows),), output=tmp_path / "data", min_counts={"C2": 9})
    columns = {column.name: column for column in preprocess(options).categorical_columns}
    for position, name, least in ((14, "C1", 2), (15, "C2", 9)):
        ids = ids_of([int(row[position], 16) for row in rows[:400] if row[position]], least)
        assert (columns[name].num_embeddings, columns[name].min_count) == (len(ids) + 1, least)


def test_hash_buckets(tmp_path: Path, write_log: WriteLog) -> None:
    """Equal values get equal ids, only missing values get 0, and buckets fill evenly."""
    rows = random_rows(4000)
    options = PreprocessOptions(
        inputs=(write_log(rows),), output=tmp_path / "data", hash_buckets=50, val_fraction=0, test_fraction=0
    )
    manifest = preprocess(options)
    verify(manifest, options.output)
    column = manifest.categorical_columns[0]
    assert (column.num_embeddings, column.distinct, column.vocabulary) == (50, None, None)
    ids = read_split(options.output, manifest, "train")["C1"].to_numpy()
    values = np.array([int(row[14], 16) if row[14] else -1 for row in rows])
    assert (ids[values == -1] == 0).all()
    assert column.rows_at_zero["train"] == (ids == 0).sum() == (values == -1).sum()
    bucket_of = dict(zip(values, ids, strict=True))
    assert [bucket_of[value] for value in values] == ids.tolist()
    rare = [value for value, count in Counter(values).items() if count == 1 and value > 2**20]
    filled = np.bincount([bucket_of[value] for value in rare], minlength=50)[1:]
    assert filled.min() > 0
    assert filled.max() < 4 * filled.mean()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[columns", "Expected"),
        ("[columns]\n", "it needs a table [columns]"),
        ("colums = 1", "colums is unknown; choose from columns, format, header, missing, separator"),
        ('[columns]\na = "number"', "a: kind 'number' is unknown; choose one of ignore, label, integer, hex, category, list"),
        (
            '[columns]\na = { kind = "list", sep = "|" }',
            "a: sep is unknown; choose from column, hash_buckets, kind, max_ids, max_length",
        ),
        ("[columns]\na = 3", "a: write its kind, one of ignore"),
        ('[columns]\na = "weight"\nb = "weight"', "columns a, b are all weights; there can be only one"),
        ('header = "false"\n[columns]\na = "integer"', "header is 'false'; write true or false, without quotes"),
        (f'[columns]\n{"a" * 200} = "integer"', "aaaaa... has a name that is too long for its files; rename it"),
        ('format = "xml"\n[columns]\na = "integer"', "format 'xml' is unknown; choose one of text, csv, jsonl"),
        (
            '[columns]\na = { kind = "float", transform = "sqrt" }',
            "a: transform 'sqrt' is unknown; choose one of log, stan",
        ),
        (
            '[columns]\na = { kind = "hex", transform = "log" }',
            ": transform is unknown; choose from column, hash_buckets",
        ),
        ('[columns]\na = { kind = "hex", hash_buckets = 1 }', "a: hash_buckets is 1; it must be an integer from 2 to 2**31"),
        ('[columns]\na = { kind = "list", max_length = true }', "a: max_length is True; it must be an integer from 1"),
        (
            '[columns]\na = { kind = "hex", hash_buckets = 9, max_ids = 3 }',
            "a: max_ids limits a vocabulary, which hash_buckets replaces",
        ),
        ('[columns]\na = "time"\nb = "user"\nc = "hex"', "rows are split by one of them, so ignore the other"),
        ('missing = "NA"\n[columns]\na = "hex"', "missing is 'NA'; write a list of texts"),
        ('[columns]\na = { kind = "time", format = "ISO" }\nb = "hex"', "a: format is 'ISO'; write it as for strptime"),
        ('[columns]\na = "label"', "there is nothing to learn from"),
        ('[columns]\n"" = "integer"', "a column's name is empty"),
        ('[columns]\nlabel = "integer"', "column label is of kind integer; the name is reserved for the label"),
        (
            'separator = "."\n[columns]\na = "integer"',
            r"separator '.' must be one ASCII character, not a letter, a digit or one of",
        ),
        ('separator = "ab"\n[columns]\na = "integer"', "separator 'ab' must be one ASCII character"),
        ('separator = "|"\n[columns]\na = "list"', "a: '|' cannot separate both columns and elements"),
    ],
)
def test_bad_schema(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "schema.toml").write_text(text)
    with pytest.raises(ValueError, match=r"^`schema` .*schema.toml: .*" + re.escape(message)):
        read_schema(tmp_path / "schema.toml")


VISITS = """
separator = ","
header = true
[columns]
click = "label"
when = "{time}"
who = "{user}"
page = "category"
"""


@pytest.fixture
def visits(tmp_path: Path) -> Callable[..., PreprocessOptions]:
    """1000 visits of 40 users in random order of time, ten per day from 2026-01-01 on."""
    draw = np.random.default_rng(1)
    days = draw.permutation(np.repeat(np.datetime64("2026-01-01") + np.arange(100), 10))
    rows = [f"{draw.integers(2)},{day},u{draw.integers(40)},{number}" for number, day in enumerate(days)]
    (tmp_path / "visits.csv").write_text("\n".join(["click,when,who,page", *rows]) + "\n")

    def options(split: SplitKind, **others: Any) -> PreprocessOptions:
        kinds = {"time": "ignore", "user": "ignore"} | {split: split}
        (tmp_path / "visits.toml").write_text(VISITS.format(**kinds))
        return PreprocessOptions(
            inputs=(tmp_path / "visits.csv",),
            output=tmp_path / f"by {split}",
            schema=read_schema(tmp_path / "visits.toml"),
            split=split,
            part_bytes=3000,
            min_count=1,
            **others,
        )

    return options


@pytest.mark.parametrize(
    ("others", "days"),
    [
        ({}, (80, 90)),
        ({"val_fraction": 0.25, "test_fraction": 0.25}, (50, 75)),
        ({"val_fraction": 0.0, "test_fraction": 0.0}, (100, 100)),
        ({"val_fraction": 0.0, "test_fraction": 0.31}, (69, 69)),
        (
            {"val_from": datetime(2026, 1, 31, tzinfo=UTC).timestamp(), "test_from": datetime(2026, 2, 10, tzinfo=UTC).timestamp()},
            (30, 40),
        ),
    ],
)
def test_by_time(visits: Callable[..., PreprocessOptions], others: dict[str, float], days: tuple[int, int]) -> None:
    """Each day is in one split, earlier days in training; rows keep the log's order."""
    options = visits("time", **others)
    manifest = preprocess(options)
    verify(manifest, options.output)
    frame = pd.read_csv(str(options.inputs[0]), parse_dates=["when"])
    day = (frame["when"] - pd.Timestamp("2026-01-01")).dt.days
    for split, chosen in {"train": day < days[0], "val": (day >= days[0]) & (day < days[1]), "test": day >= days[1]}.items():
        assert manifest.splits[split].rows == chosen.sum()
        if chosen.any():
            assert read_split(options.output, manifest, split)["label"].tolist() == frame["click"][chosen].tolist()
    start = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
    if days[0] < 100:
        assert (manifest.options["val_from"], manifest.options["test_from"]) == tuple(start + 86400 * day for day in days)


def test_by_user(visits: Callable[..., PreprocessOptions]) -> None:
    options = visits("user", val_fraction=0.2, test_fraction=0.2, seed=4)
    manifest = preprocess(options)
    verify(manifest, options.output)
    frame = pd.read_csv(str(options.inputs[0]))
    users = np.array([hash_text(user.encode()) for user in frame["who"]], np.uint64)
    drawn = options.splitting.drawn(0, users)
    for number, split in enumerate(("train", "val", "test")):
        assert manifest.splits[split].rows == (drawn == number).sum() > 0
        assert read_split(options.output, manifest, split)["label"].tolist() == frame["click"][drawn == number].tolist()
    assert pd.Series(drawn).groupby(frame["who"]).nunique().eq(1).all()


def test_new_rows_are_split_at_the_same_times(visits: Callable[..., PreprocessOptions], tmp_path: Path) -> None:
    options = visits("time")
    preprocess(options)
    (tmp_path / "today.csv").write_text("when,who,page\n2026-01-05,u,1\n2026-03-25T10:00,u,1\n2027-01-01T00:00:00.5Z,u,1\n")
    new = transform(TransformOptions(inputs=(tmp_path / "today.csv",), data=options.output, output=tmp_path / "new"))
    assert [split.rows for split in new.splits.values()] == [1, 1, 1]
    (tmp_path / "today.csv").write_text("who,page\nu,1\n")
    with pytest.raises(ValueError, match="`split` time needs a column of kind time; name one in `schema`"):
        transform(TransformOptions(inputs=(tmp_path / "today.csv",), data=options.output, output=tmp_path / "other"))
    with pytest.raises(ValueError, match="`split` user needs a column of kind user; name one in `schema`"):
        preprocess(replace(options, split="user", output=tmp_path / "other"))
    for cell, shown in ((b"", ""), (b"2026-02-30", "2026-02-30"), (b"2026-02-03T24:01", "2026-02-03T24:01"), (b"\xff", r"\\xff")):
        (tmp_path / "visits.csv").write_bytes(b"click,when,who,page\n1,2026-02-28,u,1\n1,%b,u,1\n" % cell)
        with pytest.raises(ValueError, match=rf"visits.csv:3: when '{shown}' is not a time"):
            preprocess(replace(options, output=tmp_path / "other"))


ZONES = {"": 0, "Z": 0, "UTC": 0, " UTC": 0, "+00:00": 0, "+02:00": 120, "-0530": -330, "+09": 540}


@settings(max_examples=100, deadline=None)
@given(
    moment=st.datetimes(datetime(1800, 1, 1), datetime(2200, 1, 1)),
    zone=st.sampled_from(sorted(ZONES)),
    written=st.sampled_from(["%Y-%m-%d %H:%M:%S.%f", "%Y-%m-%dT%H:%M:%S.%f000", "%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M", "%Y-%m-%d"]),
)
def test_times_as_programs_write_them(moment: datetime, zone: str, written: str) -> None:
    """ISO 8601 times, with zones and fractions as pandas, Spark and BigQuery write them."""
    if written == "%Y-%m-%d":
        zone = "Z" if zone else ""
    text = moment.strftime(written) + zone
    schema = LogSchema(columns=(Column(name="when", kind="time"),))
    parsed, good = to_parsed({"when": pa.array([text, "5"])}, schema, rows=2)
    assert good.all()
    known = datetime.fromisoformat(moment.strftime(written)).replace(tzinfo=UTC) - timedelta(minutes=ZONES[zone])
    assert parsed.split_keys is not None
    assert parsed.split_keys.tolist() == pytest.approx([known.timestamp(), 5.0], abs=1e-5)


@pytest.mark.parametrize(
    "text", ["2026-01-01+02:00", "2026-01-01 10:00 CET", "2026-01-01 10:00+2", "2026-01-01 10:00+25:00", "10:00"]
)
def test_texts_that_are_not_times(text: str) -> None:
    schema = LogSchema(columns=(Column(name="when", kind="time"),))
    parsed, good = to_parsed({"when": pa.array([text, "2026-01-01 10:00+02:00"])}, schema, rows=2)
    assert good.tolist() == [False, True]
    assert [reason.startswith(f"when '{text}' is not a time in ISO 8601, nor a number") for _, reason in parsed.reasons] == [True]


@pytest.mark.parametrize(
    ("time_format", "text", "iso"),
    [
        ("%m/%d/%Y %H:%M", "11/7/2017 9:30", "2017-11-07T09:30+00:00"),
        ("%d.%m.%y", "07.11.17", "2017-11-07T00:00+00:00"),
        ("%d/%b/%Y:%H:%M:%S %z", "10/Oct/2000:13:55:36 -0700", "2000-10-10T20:55:36+00:00"),
    ],
)
def test_times_of_a_format(tmp_path: Path, time_format: str, text: str, iso: str) -> None:
    (tmp_path / "schema.toml").write_text(
        f'separator = ","\n[columns]\nwhen = {{ kind = "time", format = "{time_format}" }}\nx = "hex"'
    )
    schema = read_schema(tmp_path / "schema.toml")
    columns = {"when": pa.array([text, iso, "\xff".encode("latin-1"), b""], pa.binary()), "x": pa.array(["1"] * 4)}
    parsed, good = to_parsed(columns, schema, rows=4)
    assert good.tolist() == [True, False, False, False]
    assert parsed.split_keys is not None
    assert parsed.split_keys.tolist() == [datetime.fromisoformat(iso).timestamp()]
    assert parsed.reasons[0] == (1, f"when '{iso}' is not a time of the format {time_format}")


def test_times_and_users_are_read_only_where_rows_are_split_by_them(
    visits: Callable[..., PreprocessOptions], tmp_path: Path
) -> None:
    options = visits("time")
    (tmp_path / "visits.csv").write_text("click,when,who,page\n1,11/7/2017 9:30,u,1\n" + "0,,u,1\n" * 9)
    with pytest.raises(ValueError, match="when '11/7/2017 9:30' is not a time in ISO 8601"):
        preprocess(options)
    manifest = preprocess(replace(options, split="chronological"))
    assert manifest.rows.written == 10
    new = transform(TransformOptions(inputs=(tmp_path / "visits.csv",), data=options.output, output=tmp_path / "new"))
    assert new.rows.written == 10


@pytest.mark.parametrize("times", [(1.0, None), (None, 1.0), (2.0, 1.0)])
def test_times_that_are_refused(visits: Callable[..., PreprocessOptions], times: tuple[float | None, float | None]) -> None:
    with pytest.raises(ValueError, match="`val_from` and `test_from` need `split` time; give both, with `val_from` no later than"):
        visits("time", val_from=times[0], test_from=times[1])
    with pytest.raises(ValueError, match="`val_from` and `test_from` need `split` time"):
        visits("user", val_from=1.0, test_from=2.0)
