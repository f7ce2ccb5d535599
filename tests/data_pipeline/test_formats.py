"""One log gives the same data set in every format, and each format's errors are reported in one line."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from consistency import verify
from hypothesis import given, settings
from hypothesis import strategies as st
from random_logs import files_of, make, read
from test_parse import GOOD_ROWS, LINES, OTHER, cells_of

from data_pipeline import tables
from data_pipeline.manifest import read_manifest
from data_pipeline.parse import parse
from data_pipeline.parts import count_parts, plan, read_parts
from data_pipeline.preprocess import PreprocessOptions, preprocess
from data_pipeline.schema import LogSchema, read_schema
from data_pipeline.tables import parse_text

COLUMNS = """
[columns]
bought = "label"
shop = "category"
cents = "integer"
code = "hex"
tags = { kind = "list", separator = " " }
"""
NAMES = ("bought", "shop", "cents", "code", "tags")


def orders(count: int) -> list[dict[str, Any]]:
    """Rows as in JSON; None is missing."""
    draw = np.random.default_rng(0)
    shops = ["north", 'the "inn", town', "größe", "", "7"]
    return [
        {
            "bought": int(draw.integers(2)),
            "shop": shops[draw.integers(5)] or None,
            "cents": int(draw.integers(-5, 10_000)) if draw.integers(4) else None,
            "code": f"{draw.integers(9):x}",
            "tags": [str(tag) for tag in draw.choice(["red", "blue", "x"], draw.integers(0, 4))],
        }
        for _ in range(count)
    ]


ROWS = orders(400)


def texts(row: dict[str, Any]) -> list[str]:
    return [" ".join(cell) if isinstance(cell, list) else "" if cell is None else str(cell) for cell in row.values()]


def as_csv(rows: list[dict[str, Any]], order: tuple[int, ...] = (0, 1, 2, 3, 4), *, header: bool = True) -> bytes:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    for cells in ([NAMES] if header else []) + [texts(row) for row in rows]:
        writer.writerow([*(cells[i] for i in order), "more"])
    return file.getvalue().encode()


def as_table(rows: list[dict[str, Any]]) -> pa.Table:
    frame = pd.DataFrame(rows).assign(other=[{"nested": 1}] * len(rows))  # cents become float64 with NaN
    return pa.Table.from_pandas(frame, preserve_index=False)


@pytest.fixture
def schema(tmp_path: Path) -> Callable[..., LogSchema]:
    def read(head: str, columns: str = COLUMNS) -> LogSchema:
        (tmp_path / "schema.toml").write_text(head + columns)
        return read_schema(tmp_path / "schema.toml")

    return read


def test_one_log_in_all_formats(tmp_path: Path, schema: Callable[..., LogSchema]) -> None:
    zstd = pa.compress(as_csv(ROWS), codec="zstd", asbytes=True)
    skipped, (first, second) = b"\x50\x2a\x4d\x18\4\0\0\0size", (as_csv(ROWS)[:999], as_csv(ROWS)[999:])  # as pzstd writes
    frames = b"".join(skipped + pa.compress(half, codec="zstd", asbytes=True) for half in (first, second))
    lines = "\n".join(json.dumps({"other": {"a": 1}} | row, ensure_ascii=False) for row in ROWS).encode()
    by_name, by_line = schema('separator = ","\nheader = true'), schema('format = "jsonl"')
    logs = {
        "quoted.csv": (as_csv(ROWS), by_name),
        "other order.csv": (as_csv(ROWS, (4, 2, 0, 3, 1)), schema('format = "csv"\nheader = true')),
        "quoted.csv.gz": (gzip.compress(as_csv(ROWS)), by_name),
        "quoted.csv.zst": (zstd, by_name),
        "quoted.csv.bz2": (bz2.compress(as_csv(ROWS)), by_name),
        "quoted.csv.xz": (lzma.compress(as_csv(ROWS)), by_name),
        "frames.csv.zst": (frames, by_name),
        "members": (gzip.compress(first) + gzip.compress(second), by_name),
        "tabs.tsv": (
            "\n".join("\t".join(cells) for cells in [NAMES, *map(texts, ROWS)]).encode(),
            schema('separator = "\\t"\nheader = true'),
        ),
        "lines.jsonl": (lines, by_line),
        "lines.jsonl.gz": (gzip.compress(lines), by_line),
    }
    frame = pd.DataFrame(ROWS)  # cents are float64, as some are missing
    texts_of_lists = frame.assign(bought=frame["bought"].astype(bool), tags=frame["tags"].map(" ".join))
    logs["pandas.csv"] = texts_of_lists.to_csv(quoting=csv.QUOTE_ALL).encode(), by_name
    logs["pandas.jsonl"] = frame.assign(bought=frame["bought"] * 1.0).to_json(orient="records", lines=True).encode(), by_line
    for name, (content, _) in logs.items():
        (tmp_path / name).write_bytes(content)
    for number, (codec, group_rows) in enumerate((("zstd", 1000), ("snappy", 30), ("none", 150))):
        pq.write_table(as_table(ROWS), tmp_path / f"{number}.parquet", compression=codec, row_group_size=group_rows)
        logs[f"{number}.parquet"] = (b"", by_name)
    actual = {}
    for number, (name, (_, log_schema)) in enumerate(logs.items()):
        options = PreprocessOptions(inputs=(tmp_path / name,), output=tmp_path / f"data{number}", schema=log_schema)
        preprocess(options)
        if number in (1, 3, 4, 6, 9):
            parts = replace(options, output=tmp_path / f"parts{number}", part_bytes=3000, workers=2)
            preprocess(parts)
            pd.testing.assert_frame_equal(read(parts.output), read(options.output))
        actual[name] = files_of(options.output, manifest=False)
    verify(read_manifest(tmp_path / "data1"), tmp_path / "data1")
    assert all(files == actual["quoted.csv"] for files in actual.values())
    assert read_manifest(tmp_path / "data0").categorical_columns[0].distinct == 4


def test_names_are_checked_before_anything_is_read(tmp_path: Path, schema: Callable[..., LogSchema]) -> None:
    by_name = schema('separator = ","\nheader = true')
    (tmp_path / "good.csv").write_bytes(as_csv(ROWS))
    (tmp_path / "bad.csv").write_bytes(as_csv(ROWS).replace(b"cents", b"eu\x0bros", 1))
    (tmp_path / "twice.csv").write_bytes(as_csv(ROWS).replace(b"cents", b"shop", 1))
    (tmp_path / "return.csv").write_bytes(as_csv(ROWS).replace(b"cents", b"ce\rnts", 1))
    (tmp_path / "long.csv").write_bytes(as_csv(ROWS).replace(b"cents", b"c" * 200_000, 1))
    pq.write_table(as_table(ROWS).drop_columns(["code"]), tmp_path / "bad.parquet")
    for name, message in {
        "bad.csv": r"bad.csv has no column 'cents'; its columns are bought, shop, eu\\x0bros, code, tags, more",
        "twice.csv": r"twice.csv has more than one column 'shop'; its columns are bought, shop, shop",
        "return.csv": r"the line of column names of .*return.csv has a carriage return within it; correct it",
        "long.csv": r"the line of column names of .*long.csv is not CSV \(field larger than field limit",
        "bad.parquet": r"bad.parquet has no column 'code'; its columns are bought, shop, cents, tags, other",
    }.items():
        inputs = (tmp_path / "good.csv", tmp_path / name)
        with pytest.raises(ValueError, match=message):
            preprocess(PreprocessOptions(inputs=inputs, output=tmp_path / "data", schema=by_name))
    pq.write_table(as_table(ROWS), tmp_path / "log.parquet")
    with pytest.raises(ValueError, match=r"log.parquet has no column label, as Criteo's logs have|no column I1, as Criteo"):
        make(tmp_path / "log.parquet", tmp_path / "data")
    assert not (tmp_path / "data").exists()


BAD_CSV = b"""bought,shop,cents,code,tags
1,"a, b",5,f,x
2,a,5,f,x
1,"a
b",5,f,x
1,a,5,f
1,a,1.5,f,x

0,"a",5,xyz,x
0,"a",5,f,x  y
0,a\rb,5,f,x
0,"""


@pytest.mark.parametrize("piece_bytes", [30, 1 << 20])
def test_malformed_lines(
    tmp_path: Path, schema: Callable[..., LogSchema], monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr(tables, "_PIECE_BYTES", piece_bytes)
    reasons = {
        3: "bought '2' is not 0 or 1",
        4: "a quoted value doesn't end on its line",
        5: "a quoted value doesn't end on its line",
        6: "4 columns where 5 are expected",
        7: "cents '1.5' is not a 32-bit integer",
        8: "blank line",
        9: "code 'xyz' is not 1 to 8 hex digits",
        10: "tags 'x  y' is not a list of non-empty elements",
        11: "a carriage return within the line",
        12: "2 columns where 5 are expected",
    }
    (tmp_path / "log.csv").write_bytes(BAD_CSV)
    options = {"schema": schema('separator = ","\nheader = true'), "val_fraction": 0, "test_fraction": 0}
    manifest = make(tmp_path / "log.csv", tmp_path / "data", max_bad_rows=20, **options)
    assert {line.line: line.reason for line in manifest.rejected_lines} == reasons
    assert manifest.rows.written == manifest.rows.read - len(reasons)
    with pytest.raises(ValueError, match=r"log.csv:3: bought '2' is not 0 or 1; fix the log"):
        make(tmp_path / "log.csv", tmp_path / "other", **options)


def test_malformed_rows_of_parquet(tmp_path: Path, schema: Callable[..., LogSchema]) -> None:
    by_name = schema("")
    rows = [dict(row) for row in ROWS[:300]]
    rows[250] |= {"bought": 3}
    for row in rows[100:220]:
        row["code"] = "none"
    pq.write_table(as_table(rows), tmp_path / "log.parquet", row_group_size=70)
    options = PreprocessOptions(inputs=(tmp_path / "log.parquet",), output=tmp_path / "data", schema=by_name, part_bytes=20_000)
    with pytest.raises(ValueError, match=r"log.parquet:101: code 'none' is not 1 to 8 hex digits"):
        preprocess(options)
    for part_bytes in (20_000, 1 << 20):
        with pytest.raises(ValueError, match=r"log.parquet:101: .*; it is the first of more than 120 malformed lines"):
            preprocess(replace(options, max_bad_rows=120, part_bytes=part_bytes))
    content = (tmp_path / "log.parquet").read_bytes()
    (tmp_path / "log.parquet").write_bytes(content[:-20])
    with pytest.raises(ValueError, match=r"log.parquet: damaged Parquet \(.*; fetch or write it again"):
        preprocess(options)


@settings(max_examples=60, deadline=None)
@given(lines=LINES, newline=st.sampled_from(["\n", "\r\n"]))
def test_arrow_reads_what_the_parser_reads(lines: list[list[str]], newline: str) -> None:
    lines = [[cell.replace('"', "").replace("\r", "") for cell in line] for line in lines]
    text = "".join(",".join(row) + newline for line in lines for row in (line, *GOOD_ROWS)).encode()
    names = tuple(column.name for column in OTHER.columns)
    expected = parse(np.frombuffer(text, np.uint8), OTHER)
    for schema in (OTHER, replace(OTHER, format="csv")):
        actual = parse_text(text, schema, names)
        for row in range(expected.rows):
            assert cells_of(actual, OTHER, row) == cells_of(expected, OTHER, row)
        assert actual.starts.tolist() == expected.starts.tolist()
        assert (actual.lines, actual.reasons) == (expected.lines, expected.reasons)


def test_parts_of_parquet(tmp_path: Path) -> None:
    """Small groups share a part, large ones are divided; every row is in one part."""
    table = pa.table({"a": np.arange(1000), "b": np.arange(1000) % 7})
    for group_rows in (1, 10, 99, 400, 1000):
        pq.write_table(table, tmp_path / "log.parquet", row_group_size=group_rows)
        for part_bytes in (1, 100, 3000, 1 << 20):
            metadata = pq.read_metadata(tmp_path / "log.parquet")
            parts = plan(metadata, part_bytes)
            row_bytes = metadata.row_group(0).total_byte_size / group_rows
            assert max(part.rows - 1 for part in parts) * row_bytes < part_bytes
            assert [part.start for part in parts] == np.cumsum([0, *(part.rows for part in parts)])[:-1].tolist()
            assert sum(part.rows for part in parts) == 1000
            assert part_bytes < 1 << 20 or len(parts) == 1
            if part_bytes >= 3000:
                log = tmp_path / "log.parquet"
                cut = list(read_parts(0, log, part_bytes=part_bytes, skip=lambda number: False, columns={"b"}))
                assert pa.concat_tables([part.content for part in cut]).equals(table.select(["b"]))
                assert [part.last for part in cut] == [False] * (count_parts(log, part_bytes) - 1) + [True]
    pq.write_table(pa.table({"tags": [[n % 3] * 500 for n in range(1000)]}), tmp_path / "log.parquet")
    assert len(plan(pq.read_metadata(tmp_path / "log.parquet"), 1 << 20)) == 4, "elements count, however few bytes encode them"
