"""A log gives the same data set however it is compressed and cut, and each format's errors are reported in one line."""

import bz2
import csv
import gzip
import io
import lzma
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_logs import files_of, make, schema_of
from refusals import refuse
from test_parse import GOOD_ROWS, LINES, OTHER, cells_of

from data_pipeline import tables
from data_pipeline.parse import parse
from data_pipeline.parts import count_parts, plan, read_parts
from data_pipeline.schema import Kind
from data_pipeline.tables import parse_text

KINDS: dict[str, Kind] = {"bought": "label", "shop": "category", "cents": "integer", "code": "hex", "tags": "list"}
ORDERS = schema_of(KINDS, element_separator=" ", header=True, format="csv")
SHOPS = ("north", 'the "inn", town', "größe", None, "7")
ROWS: list[dict[str, Any]] = [  # as in JSON; None is missing
    dict(zip(KINDS, (n % 2, SHOPS[n % 5], n * 37 if n % 4 else None, f"{n % 9:x}", ["red", "blue", "x"][: n % 4]), strict=True))
    for n in range(400)
]


def as_csv(rows: list[dict[str, Any]]) -> bytes:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*KINDS, "more"])
    for row in rows:
        writer.writerow([*(" ".join(cell) if isinstance(cell, list) else cell for cell in row.values()), "more"])
    return file.getvalue().encode()


def as_table(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows).append_column("other", pa.array([{"nested": 1}] * len(rows)))


def as_frames(text: bytes) -> bytes:
    """Compress as pzstd does: several frames, and before each one that is skipped."""
    return b"".join(b"\x50\x2a\x4d\x18\4\0\0\0size" + pa.compress(half, "zstd", asbytes=True) for half in (text[:999], text[999:]))


@pytest.mark.parametrize(
    "compress",
    [
        lambda text: bz2.compress(text[:999]) + bz2.compress(text[999:]),
        lambda text: lzma.compress(text[:999]) + bytes(8) + lzma.compress(text[999:]) + bytes(4),
        as_frames,
        lambda text: gzip.compress(text[:999]) + gzip.compress(text[999:]),
    ],
    ids=["streams of bzip2", "padded streams of xz", "frames of zstd", "members of gzip"],
)
def test_compressed_logs(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    for name, content in (("plain", as_csv(ROWS)), ("compressed", compress(as_csv(ROWS)))):
        (tmp_path / name).write_bytes(content)
        make(tmp_path / name, tmp_path / f"{name} data", schema=ORDERS, part_bytes=3000, workers=2)
    plain, compressed = (files_of(tmp_path / f"{name} data", manifest=False) for name in ("plain", "compressed"))
    assert compressed == plain
    assert len(plain) > 8


def test_names_are_checked_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "good.csv").write_bytes(as_csv(ROWS))
    pq.write_table(as_table(ROWS).drop_columns(["code"]), tmp_path / "bad.parquet")
    for name, cents, message in (
        ("bad.csv", b"eu\x0bros", r"bad.csv has no column 'cents'; its columns are bought, shop, eu\\x0bros, code, tags, more"),
        ("twice.csv", b"shop", r"twice.csv has more than one column 'shop'; its columns are bought, shop, shop"),
        ("return.csv", b"ce\rnts", r"the line of column names of .*return.csv has a carriage return within it; correct it"),
        ("long.csv", b"c" * 200_000, r"the line of column names of .*long.csv is not CSV \(field larger than field limit"),
        ("bad.parquet", None, r"bad.parquet has no column 'code'; its columns are bought, shop, cents, tags, other"),
    ):
        if cents:
            (tmp_path / name).write_bytes(as_csv(ROWS).replace(b"cents", cents, 1))
        refuse(message, make, (tmp_path / "good.csv", tmp_path / name), tmp_path / "data", schema=ORDERS)
    pq.write_table(as_table(ROWS), tmp_path / "log.parquet")
    refuse("log.parquet has no column I1, as Criteo's logs have", make, tmp_path / "log.parquet", tmp_path / "data")
    assert not (tmp_path / "data").exists()


BAD_CSV = b"""bought,shop,cents,code,tags
1,"a, b",5,f,x
2,a,5,f,x
1,"a
b",5,f,x

0,"a",5,f,x  y
0,a\rb,5,f,x
1,a",5,f,"x
1,"the \\"inn\\" town",5,f,x
0,"\\",5,f,x
0,"""


@pytest.mark.parametrize("piece_bytes", [30, 1 << 20])
def test_malformed_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    monkeypatch.setattr(tables, "_PIECE_BYTES", piece_bytes)
    reasons = {
        3: "bought '2' is not 0 or 1",
        4: "a quoted value doesn't end on its line",
        5: "a quoted value doesn't end on its line",
        6: "blank line",
        7: "tags 'x  y' is not a list of non-empty elements",
        8: "a carriage return within the line",
        9: "a value doesn't end on its line, or others follow it",
        10: 'a quote follows a backslash; write "" for a quote within quotes',
        12: "2 columns where 5 are expected",
    }
    log, data = tmp_path / "log.csv", tmp_path / "data"
    log.write_bytes(BAD_CSV)
    refuse("log.csv:3: bought '2' is not 0 or 1; fix the log", make, log, data, schema=ORDERS)
    hint = "; if it holds column names, set header = true in the schema; fix the log"
    refuse(f"log.csv:1: .*{hint}", make, log, data, schema=schema_of({"bought": "label", "cents": "integer"}))
    manifest = make(log, data, schema=ORDERS, max_bad_rows=20)
    assert {line.line: line.reason for line in manifest.rejected_lines} == reasons
    assert manifest.rows.written == manifest.rows.read - len(reasons)


def test_malformed_rows_of_parquet(tmp_path: Path) -> None:
    rows = [dict(row) for row in ROWS[:300]]
    rows[250] |= {"bought": 3}
    for row in rows[100:220]:
        row["code"] = "none"
    pq.write_table(as_table(rows), tmp_path / "log.parquet", row_group_size=70)
    log, data = tmp_path / "log.parquet", tmp_path / "data"
    refuse(r"log.parquet:101: code 'none' is not 1 to 8 hex digits", make, log, data, schema=ORDERS, part_bytes=20_000)
    message = r"log.parquet:101: .*; it is the first of more than 120 malformed lines"
    for part_bytes in (20_000, 1 << 20):
        refuse(message, make, log, data, schema=ORDERS, max_bad_rows=120, part_bytes=part_bytes)
    log.write_bytes(log.read_bytes()[:-20])
    refuse(r"log.parquet: damaged Parquet \(.*; fetch or write it again", make, log, data, schema=ORDERS)


@settings(max_examples=60)
@given(lines=LINES, newline=st.sampled_from(["\n", "\r\n"]), mark=st.sampled_from(["", "\ufeff"]))
def test_arrow_reads_what_the_parser_reads(lines: list[list[str]], newline: str, mark: str) -> None:
    lines = [[cell.replace('"', "").replace("\r", "") for cell in line] for line in lines]
    rows = [row for line in lines for row in (line, *GOOD_ROWS)]
    text = "".join([mark if lines else "", *(",".join(row) + newline for row in rows)]).encode()
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
    forever = pa.array([datetime(9999, 12, 31)], pa.timestamp("us"))
    pq.write_table(pa.table({"until": forever}), tmp_path / "log.parquet", use_deprecated_int96_timestamps=True)
    (part,) = read_parts(0, tmp_path / "log.parquet", part_bytes=99, skip=lambda number: False)
    assert part.content["until"].equals(pa.chunked_array([forever]))
    tags = pa.array([row["tags"] for row in ROWS], pa.list_(pa.dictionary(pa.int32(), pa.string())))  # as Polars' categories
    pq.write_table(pa.table({"tags": tags}), tmp_path / "log.parquet", row_group_size=70)
    (part,) = read_parts(0, tmp_path / "log.parquet", part_bytes=1 << 20, skip=lambda number: False)
    assert part.content["tags"].to_pylist() == tags.to_pylist()


def test_texts_that_repeat_take_the_memory_of_their_dictionaries(tmp_path: Path) -> None:
    table = pa.table({"page": [f"{number // 1000}" * 500 for number in range(10_000)]})
    pq.write_table(table, tmp_path / "log.parquet", row_group_size=1500)
    (part,) = read_parts(0, tmp_path / "log.parquet", part_bytes=1 << 20, skip=lambda number: False)
    assert part.content.nbytes < table.nbytes / 20
    assert part.content.cast(table.schema).equals(table)
