"""Categories of every type that a format has: equal values have equal ids, in all formats and in requests."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_pipeline.encoder import RequestEncoder
from data_pipeline.manifest import read_manifest
from data_pipeline.options import PreprocessOptions
from data_pipeline.preprocess import preprocess
from data_pipeline.schema import Column, LogSchema
from data_pipeline.transform import TransformOptions, transform

SCHEMA = {"columns": (Column(name="y", kind="label"), Column(name="c", kind="category"), Column(name="l", kind="list"))}
CSV = 'y,c,l\n0,1,1|0\n1,0,0\n0,1,1\n1,0,"1"\n'
ONCE: dict[str, Any] = {"min_count": 1, "val_fraction": 0, "test_fraction": 0}


def made(folder: Path, log: Path, **settings: Any) -> Path:
    preprocess(PreprocessOptions(inputs=(log,), output=folder, schema=LogSchema(**SCHEMA, **settings), **ONCE))
    return folder


def rows(data: Path) -> pa.Table:
    return pa.concat_tables([pq.read_table(data / shard.path) for shard in read_manifest(data).splits["train"].shards])


@pytest.fixture
def from_csv(tmp_path: Path) -> Path:
    (tmp_path / "log.csv").write_text(CSV)
    return made(tmp_path / "csv", tmp_path / "log.csv", format="csv", separator=",", header=True)


def test_true_is_one_in_every_format(from_csv: Path, tmp_path: Path) -> None:
    values = {"y": [0, 1, 0, 1], "c": [True, False, True, False], "l": [[True, False], [False], [True], [True]]}
    pq.write_table(pa.table(values), tmp_path / "log.parquet")
    lines = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
    (tmp_path / "log.jsonl").write_text("".join(f"{line}\n".replace("'", '"').lower() for line in lines))
    from_parquet = made(tmp_path / "parquet", tmp_path / "log.parquet", header=True)
    from_json = made(tmp_path / "json", tmp_path / "log.jsonl", format="jsonl")
    assert rows(from_parquet).equals(rows(from_csv))
    assert rows(from_json).equals(rows(from_csv))
    requests = [RequestEncoder(from_csv)([{"c": line["c"], "l": line["l"]} for line in lines])]
    requests += [RequestEncoder(from_csv)([{"c": str(int(line["c"])), "l": [int(each) for each in line["l"]]} for line in lines])]
    for request in requests:
        assert request.values[:4].tolist() == rows(from_csv)["c"].to_pylist()
        assert request.values[4:].tolist() == [each for ids in rows(from_csv)["l"].to_pylist() for each in ids]


def test_texts_of_any_parquet_type(tmp_path: Path) -> None:
    ids = [uuid.UUID(int=k) for k in (5, 6, 5)]
    words = [b"abcd", b"efgh", b"abcd"]
    typed = {
        "uuid": pa.array([each.bytes for each in ids], pa.uuid()),
        "text": pa.array([str(each) for each in ids]),
        "fixed": pa.array(words, pa.binary(4)),
        "view": pa.array(words, pa.binary_view()),
        "string": pa.array([word.decode() for word in words], pa.string_view()),
        "plain": pa.array(words),
    }
    columns = (Column(name="y", kind="label"), *(Column(name=name, kind="category") for name in typed))
    log = tmp_path / "log.parquet"
    pq.write_table(pa.table({"y": [0, 1, 0], **typed}), log)
    preprocess(PreprocessOptions(inputs=(log,), output=tmp_path / "data", schema=LogSchema(columns=columns, header=True), **ONCE))
    requests = RequestEncoder(tmp_path / "data")(
        [
            {
                name: str(ids[0]) if len(str(cell)) > 4 else "abcd"
                for name, cell in {
                    "uuid": ids[0],
                    "text": ids[0],
                    "fixed": "abcd",
                    "view": "abcd",
                    "string": "abcd",
                    "plain": "abcd",
                }.items()
            }
        ]
    )
    written = rows(tmp_path / "data")
    for name in typed:
        assert written[name].to_pylist() == written["plain"].to_pylist(), name
    assert set(requests.values.tolist()) == {written["plain"][0].as_py()}


def test_transform_gives_booleans_the_ids_of_digits(from_csv: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"y": [0, 1], "c": [True, False], "l": [[True], [False]]}), tmp_path / "new.parquet")
    transform(TransformOptions(inputs=(tmp_path / "new.parquet",), data=from_csv, output=tmp_path / "new"))
    manifest = read_manifest(tmp_path / "new")
    [shard] = [shard for split in manifest.splits.values() for shard in split.shards]
    assert pq.read_table(tmp_path / "new" / shard.path)["c"].to_pylist() == rows(from_csv)["c"].to_pylist()[:2]
