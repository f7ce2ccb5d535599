"""Numbers at the limits of their types, and logs whose first bytes are not a row."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_pipeline.encoder import RequestEncoder
from data_pipeline.inspection import find_text
from data_pipeline.manifest import Manifest, read_manifest
from data_pipeline.npy import export_npy
from data_pipeline.options import PreprocessOptions
from data_pipeline.preprocess import preprocess
from data_pipeline.schema import Column, LogSchema
from data_pipeline.verify import verify

LABEL = Column(name="y", kind="label")
NO_SPLITS: dict[str, Any] = {"val_fraction": 0, "test_fraction": 0}


def made(folder: Path, content: bytes, columns: Sequence[Column], **options: Any) -> tuple[Manifest, pa.Table]:
    """Preprocess a log without a test split; return the manifest and the rows."""
    schema = LogSchema(columns=(LABEL, *columns), **options)
    (folder / "log").write_bytes(content)
    options = PreprocessOptions(
        inputs=(folder / "log",), output=folder / "data", schema=schema, max_bad_rows=9, min_count=1, **NO_SPLITS
    )
    preprocess(options)
    manifest = read_manifest(folder / "data")
    verify(manifest, folder / "data")
    return manifest, pa.concat_tables([pq.read_table(folder / "data" / shard.path) for shard in manifest.splits["train"].shards])


def test_equal_values_are_standardized_to_zero(tmp_path: Path) -> None:
    x = Column(name="x", kind="float", transform="standardize")
    manifest, rows = made(tmp_path, b"0,0.1\n" * 30, [x], separator=",")
    assert manifest.integer_columns[0].scale == 1
    np.testing.assert_allclose(rows["x"].to_numpy(), 0, atol=1e-12)


@pytest.mark.parametrize("transform", ["none", "log", "standardize"])
def test_floats_that_32_bits_do_not_hold_are_malformed(transform: Any, tmp_path: Path) -> None:
    x = Column(name="x", kind="float", transform=transform)
    manifest, rows = made(tmp_path, b"0,1e39\n1,-1e300\n1,2\n0,-3e38\n0,5\n", [x], separator=",", format="csv")
    assert (manifest.rows.rejected, len(rows)) == (2, 3)
    assert np.isfinite(rows["x"].to_numpy()).all()


MARKED = (
    Column(name="x", kind="integer"),
    Column(name="z", kind="float"),
    Column(name="c", kind="category"),
    Column(name="l", kind="list"),
)
MARKED_CELLS = [["1", "0.5", "a", "p|q"], ["NA", "NaN", "NA", "NaN"], ["", "", "", ""], ["3", "NaN", "b", "r"]]


@pytest.mark.parametrize("form", ["text", "csv", "jsonl", "parquet"])
def test_marks_of_missing_cells_are_empty_cells(tmp_path: Path, form: str) -> None:
    """In every format, in requests and in lookups."""
    records = [dict(zip("yxzcl", [str(row % 2), *cells], strict=True)) for row, cells in enumerate(MARKED_CELLS)]
    if form == "jsonl":
        marked = b"".join(json.dumps(record | {"l": record["l"].split("|")}).encode() + b"\n" for record in records)
        marked = marked.replace(b'["NaN"]', b"[]").replace(b'[""]', b"[]")
    elif form == "parquet":
        pq.write_table(pa.Table.from_pylist(records), tmp_path / "log.parquet", use_dictionary=["c"])
        marked = (tmp_path / "log.parquet").read_bytes()
    else:
        marked = b"".join(",".join(record.values()).encode() + b"\n" for record in records)
    options: dict[str, Any] = {"separator": ",", "format": "csv" if form == "parquet" else form, "missing": ("NA", "NaN")}
    manifest, rows = made(tmp_path, marked, MARKED, **options)
    assert manifest.rows.written == 4
    assert rows["x"].to_pylist() == pytest.approx([np.log(2), 0, 0, np.log(4)])
    assert rows["c"].to_pylist() == [1, 0, 0, 2] or rows["c"].to_pylist() == [2, 0, 0, 1]
    assert [len(ids) for ids in rows["l"].to_pylist()] == [2, 0, 0, 1]
    requests: list[dict[str, Any]] = [{"x": "NA", "z": "NaN", "c": "NA", "l": "NaN"}, {"x": None, "z": None, "c": "", "l": None}]
    flat = RequestEncoder(tmp_path / "data")(requests)
    assert not flat.dense.any()
    assert not flat.values.any()
    assert flat.lengths.tolist() == [1, 1, 0, 0]
    assert find_text(manifest, tmp_path / "data", "c", "NA").id == 0


@pytest.mark.parametrize(
    ("form", "content", "mark"),
    [("csv", b"0,NA\n", '["NA"]'), ("csv", b"0,\\N\n", r'["\\N"]')],
)
@pytest.mark.parametrize("kind", ["integer", "float"])
def test_unknown_marks_of_missing_cells_name_the_setting(tmp_path: Path, form: str, content: bytes, mark: str, kind: Any) -> None:
    schema = LogSchema(columns=(LABEL, Column(name="x", kind=kind)), separator=",", format=form)  # type: ignore[arg-type]
    (tmp_path / "log").write_bytes(content)
    with pytest.raises(ValueError, match=f"if it stands for a missing value, set missing = {re.escape(mark)} in the schema"):
        preprocess(PreprocessOptions(inputs=(tmp_path / "log",), output=tmp_path / "data", schema=schema))


def test_json_lines_have_no_header_and_nan_is_missing(tmp_path: Path) -> None:
    x = Column(name="x", kind="float", transform="none")
    content = b"".join(json.dumps({"y": 0, "x": k}).encode() + b"\n" for k in (0, 1, float("nan"), 3, 4))
    manifest, rows = made(tmp_path, content, [x], header=True, format="jsonl")
    assert (rows["x"].to_pylist(), manifest.integer_columns[0].missing) == ([0, 1, 0, 3, 4], 1)


@pytest.mark.parametrize("quoted", [b"a", b'"a"'])
def test_a_byte_order_mark_is_not_a_part_of_the_first_value(quoted: bytes, tmp_path: Path) -> None:
    columns = (Column(name="c", kind="category"), LABEL)
    (tmp_path / "log").write_bytes(b"\xef\xbb\xbf" + quoted + b",0\na,1\n")
    schema = LogSchema(columns=columns, separator=",", format="csv")
    options = PreprocessOptions(inputs=(tmp_path / "log",), output=tmp_path / "data", schema=schema, min_count=1, **NO_SPLITS)
    preprocess(options)
    assert read_manifest(tmp_path / "data").categorical_columns[0].distinct == 1


@pytest.mark.parametrize("part_bytes", [1 << 20, 40])
def test_a_lone_carriage_return_is_malformed_in_any_part(part_bytes: int, tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"0,a\n" * 9 + b"0,x\ry\n" + b"1,b\r\n" * 9 + b'1,"c"\n' * 9)
    schema = LogSchema(columns=(LABEL, Column(name="c", kind="category")), separator=",", format="csv")
    options = PreprocessOptions(inputs=(tmp_path / "log",), output=tmp_path / "data", schema=schema, max_bad_rows=1, **NO_SPLITS)
    assert preprocess(replace(options, part_bytes=part_bytes)).rows.rejected == 1


def test_the_largest_integer_of_64_bits(tmp_path: Path) -> None:
    x = Column(name="x", kind="int64", transform="none")
    manifest, rows = made(tmp_path, b"0,9223372036854775807\n1,-9223372036854775808\n1,9300000000000000000\n", [x], separator=",")
    assert (manifest.rows.rejected, rows["x"].to_pylist()) == (1, [2.0**63, -(2.0**63)])


@pytest.mark.parametrize("unit", ["s", "us", "ns"])
def test_far_times_and_nanoseconds(unit: str, tmp_path: Path) -> None:
    times = [datetime(2260, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC), datetime(1970, 1, 1, tzinfo=UTC)]
    stamps = pa.array(times, pa.timestamp("us", "UTC")).cast(pa.timestamp(unit, "UTC"))
    if unit == "ns":
        stamps = pa.array(np.asarray(stamps.cast(pa.int64())) + 7, pa.timestamp("ns", "UTC"))
    pq.write_table(pa.table({"y": [0, 1, 0], "t": stamps}), tmp_path / "log")
    schema = LogSchema(columns=(LABEL, Column(name="t", kind="time")), format="csv")
    options = PreprocessOptions(inputs=(tmp_path / "log",), output=tmp_path / "data", schema=schema, split="time", **NO_SPLITS)
    preprocess(options)
    assert read_manifest(tmp_path / "data").rows.written == 3


def test_arrays_of_no_columns(tmp_path: Path) -> None:
    manifest, _ = made(tmp_path, b"0,a\n1,b\n" * 5, [Column(name="c", kind="category")], separator=",")
    export_npy(manifest, tmp_path / "data", tmp_path / "npy")
    assert np.load(tmp_path / "npy" / "train_dense.npy").shape == (10, 0)
