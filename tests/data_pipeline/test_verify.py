"""A manifest is read completely or refused with the key at fault, and `verify` finds every kind of damage."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from random_logs import make

from data_pipeline.manifest import Manifest, file_sha256, read_manifest
from data_pipeline.schema import Column, LogSchema
from data_pipeline.verify import verify

Change = Callable[[dict[str, Any]], object]


def edit(data: Path, change: Change) -> None:
    content = json.loads((data / "manifest.json").read_text())
    change(content)
    (data / "manifest.json").write_text(json.dumps(content))


def emptied(manifest: dict[str, Any], *splits: str) -> None:
    for name in splits:
        manifest["splits"][name] |= {"rows": 0, "shards": []}


def describe(data: Path, entry: dict[str, Any]) -> None:
    """State the size and checksum that a file has now."""
    path = data / entry["path"]
    entry |= {"bytes": path.stat().st_size, "sha256": file_sha256(path)}


def refused(data: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        verify(read_manifest(data), data)
    assert "\n" not in str(caught.value)


def test_keys_of_the_file(data: Path) -> None:
    """The keys are a contract, because other tools read them."""
    content = json.loads((data / "manifest.json").read_text())
    assert set(content) == {field.name for field in dataclasses.fields(Manifest)}
    assert content["rows"] == {"in": 400, "written": 400, "rejected": 0}
    assert set(content["splits"]["train"]["shards"][0]) == {"path", "rows", "bytes", "sha256", "from_rows"}
    verified = verify(read_manifest(data), data)
    assert verified.rows == 400
    assert verified.files == sum(len(split["shards"]) for split in content["splits"].values()) + 2 * 26


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop("rows"), "manifest.json: rows: Field required"),
        (lambda m: m["rows"].pop("in"), "manifest.json: rows.in: Field required"),
        (lambda m: m["splits"].pop("val"), "manifest.json: splits.val: Field required"),
        (lambda m: m["categorical_columns"][2].update(num_embeddings="many"), "categorical_columns.2.num_embeddings: .*integer"),
        (lambda m: m.update(format_version=99), "format_version: Input should be 1; run `comera preprocess` again"),
        (lambda m: m.pop("format"), "format: Field required"),
        (lambda m: m["splits"]["train"]["shards"][0].update(path="../x"), r"manifest.json: ../x is outside of .*data; run"),
        (lambda m: m["splits"]["train"]["shards"][0].update(path="train/../../x"), "x is outside of .*data"),
        (lambda m: m["categorical_columns"][0]["vocabulary"].update(path="/etc/passwd"), "/etc/passwd is outside of .*data"),
        (lambda m: m["splits"]["train"].update(rows=319), "split train states 319 rows, but its shards 320"),
        (lambda m: m["categorical_columns"][2].update(vocabulary=None, table=None), "the manifest names no vocabulary of C3"),
        (
            lambda m: m["splits"].update(test=m["splits"]["val"]),
            r"hold \d+ of input rows \d+ to \d+; expected all rows from \d+ on",
        ),
        (lambda m: emptied(m, "test"), r"shards hold \d+ of input rows 3\d\d to \d+; expected all rows from 3"),
        (lambda m: emptied(m, "val", "test"), "the splits hold 320 of 400 rows"),
        (lambda m: emptied(m, "train"), r"hold \d+ of input rows 320 to \d+; expected all rows from 0 on"),
        (lambda m: m["splits"]["train"]["shards"].reverse(), "starts before the end of the shard listed before it"),
    ],
)
def test_bad_manifest(data: Path, change: Change, message: str) -> None:
    edit(data, change)
    refused(data, message)


def test_no_manifest_and_no_json_object(data: Path) -> None:
    for text in ("", "{", "[]"):
        (data / "manifest.json").write_text(text)
        refused(data, r"manifest.json: the file: .*run `comera preprocess` again")
    (data / "manifest.json").unlink()
    refused(data, r"manifest.json does not exist: .* make one with `comera preprocess`")


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("C3", 9999, r"part-00000.parquet, rows 0 to \d+: C3 holds ids that are not in 0..\d+; run `comera preprocess` again"),
        ("C3", -1, "C3 holds ids that are not in"),
        ("C3", 0, r"train holds id 0 of C3 \d+ times, not \d+"),
        ("label", 2, "label holds values other than 0 and 1"),
        ("label", 1, r"train holds \d+ labels of 1, but the mean of label is stated as"),
        ("I4", float("nan"), "I4 holds values that are not finite, or negative logarithms"),
        (None, 0, r"part-00000.parquet has \d+ rows, but the manifest states \d+"),
    ],
)
def test_changed_cells(data: Path, column: str | None, value: float, message: str) -> None:
    """And a row that is missing; the checksum fits."""

    def change(manifest: dict[str, Any]) -> None:
        entry = manifest["splits"]["train"]["shards"][0]
        path = data / entry["path"]
        schema, recorded = pq.read_schema(path), pq.read_metadata(path).metadata[b"comera_rec.rows"]
        frame = pd.read_parquet(path)
        if column is None:
            frame = frame[1:]
        else:
            frame.loc[frame.index[frame[column] != value][0], column] = value
        table = pa.Table.from_pandas(frame, schema, preserve_index=False)
        pq.write_table(table.replace_schema_metadata({b"comera_rec.rows": recorded}), path)
        describe(data, entry)

    edit(data, change)
    refused(data, message)


def test_other_bytes_and_truncation(data: Path) -> None:
    path = data / read_manifest(data).splits["train"].shards[1].path
    whole = path.read_bytes()
    path.write_bytes(whole[:200] + bytes([whole[200] ^ 1]) + whole[201:])
    refused(data, r"part-00001.parquet differs from the SHA-256")
    path.write_bytes(whole[:-5])
    refused(data, r"part-00001.parquet has \d+ bytes, but the manifest states \d+")


def test_shard_copied_over_another(data: Path) -> None:
    """Counts and checksums are correct, but rows are in two splits."""

    def copy(manifest: dict[str, Any]) -> None:
        val, test = (manifest["splits"][name]["shards"][0] for name in ("val", "test"))
        shutil.copy(data / val["path"], data / test["path"])
        describe(data, test)

    edit(data, copy)
    refused(data, r"test/part-00000.parquet doesn't hold the rows that the manifest states, but those of another shard")


def rewritten(vocabulary: Path, change: Callable[[pd.DataFrame], pd.DataFrame]) -> None:
    schema = pq.read_schema(vocabulary)
    pq.write_table(pa.Table.from_pandas(change(pd.read_parquet(vocabulary)), schema, preserve_index=False), vocabulary)


def swap_values(frame: pd.DataFrame) -> pd.DataFrame:
    values = frame["value"].tolist()
    return frame.assign(value=[values[1], values[0], *values[2:]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda words, table: words.write_bytes(b"junk"), "C3.parquet, from row 0 on, cannot be read"),
        (lambda words, table: pq.write_table(pa.table({"value": [1]}), words), "C3.parquet is not a vocabulary of values and"),
        (lambda words, table: rewritten(words, swap_values), "C3.parquet, from id 1 on, doesn't list|the table of C3 gives its"),
        (lambda words, table: rewritten(words, lambda frame: frame[::-1]), "C3.parquet, from id 1 on, doesn't list values by"),
        (lambda words, table: rewritten(words, lambda frame: frame[:-1]), r"C3 has \d+ embeddings, but its vocabulary has \d+ val"),
        (
            lambda words, table: rewritten(words, lambda frame: frame.assign(count=frame["count"] + 10)),
            r"training rows hold \d+ ids of C3, but its vocabulary counts \d+",
        ),
        (lambda words, table: table.write_bytes(b"junk"), r"C3.table is not a table of \d+ values"),
        (lambda words, table: table.write_bytes(bytes(table.stat().st_size)), "C3.table is not a table of"),
        (lambda words, table: table.write_bytes(b"\1" * table.stat().st_size), "C3.table is not a table of"),
    ],
)
def test_junk_as_vocabulary(data: Path, change: Callable[[Path, Path], None], message: str) -> None:
    """With checksums that fit."""
    change(data / "vocabulary" / "C3.parquet", data / "vocabulary" / "C3.table")
    edit(data, lambda m: [describe(data, m["categorical_columns"][2][file]) for file in ("vocabulary", "table")])
    refused(data, message)


def test_sums_of_weights_and_labels(tmp_path: Path) -> None:
    kinds: dict[str, Any] = {"click": "label", "buy": "label", "w": "weight", "c": "hex"}
    schema = LogSchema(columns=tuple(Column(name=name, kind=kind) for name, kind in kinds.items()), separator=",")
    (tmp_path / "log").write_text("1,0,0.5,1\n0,1,2,1\n" * 20)
    make(tmp_path / "log", tmp_path / "data", schema=schema)
    edit(tmp_path / "data", lambda m: m["other_labels"][0]["split_means"].update(val=0.9))
    refused(tmp_path / "data", r"val holds .* labels of 1, but the mean of buy is stated as 0\.9")
    edit(tmp_path / "data", lambda m: m["weight"]["split_means"].update(test=0.5) or m.update(other_labels=[]))
    refused(tmp_path / "data", r"test holds weights that sum to .*, but the mean of w is stated as 0.5")
