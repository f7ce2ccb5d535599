"""`verify` finds every kind of damage."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from random_logs import make, random_rows

from data_pipeline.manifest import CategoricalColumn, Manifest, describe_file
from data_pipeline.schema import Column, LogSchema
from data_pipeline.verify import verify

ROWS = random_rows(400)


@pytest.fixture
def data(tmp_path: Path, write_log: Callable[..., Path]) -> tuple[Manifest, Path]:
    return make(write_log(ROWS), tmp_path / "data", part_bytes=10_000), tmp_path / "data"


def with_first_shard(manifest: Manifest, folder: Path, change: Callable[[pd.DataFrame], None]) -> Manifest:
    """Change train's first shard; return the manifest with its new checksum."""
    train = manifest.splits["train"]
    path = folder / train.shards[0].path
    schema, metadata = pq.read_schema(path), pq.read_metadata(path).metadata
    frame = pd.read_parquet(path)
    change(frame)
    table = pa.Table.from_pandas(frame, schema, preserve_index=False)
    pq.write_table(table.replace_schema_metadata({b"comera_rec.rows": metadata[b"comera_rec.rows"]}), path)
    first = replace(describe_file(train.shards[0].path, folder, rows=len(frame)), from_rows=train.shards[0].from_rows)
    return replace(manifest, splits=manifest.splits | {"train": replace(train, shards=(first, *train.shards[1:]))})


def test_whole(data: tuple[Manifest, Path]) -> None:
    verified = verify(*data)
    assert verified.rows == 400
    assert verified.files == sum(len(split.shards) for split in data[0].splits.values()) + 2 * 26


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("C3", 9999, r"part-00000.parquet, rows 0 to \d+: C3 holds ids that are not in 0..\d+; run `comera preprocess` again"),
        ("C3", -1, "C3 holds ids that are not in"),
        ("C3", 0, r"train holds id 0 of C3 \d+ times, not \d+"),
        ("label", 2, "label holds values other than 0 and 1"),
        ("label", 1, r"train holds \d+ labels of 1, but the mean of label is stated as"),
        ("I4", float("nan"), "I4 holds values that are not finite, or negative logarithms"),
    ],
)
def test_changed_cells(data: tuple[Manifest, Path], column: str, value: float, message: str) -> None:
    def change(frame: pd.DataFrame) -> None:
        frame.loc[frame.index[frame[column] != value][0], column] = value

    with pytest.raises(ValueError, match=message):
        verify(with_first_shard(*data, change), data[1])


def test_other_bytes_and_truncation(data: tuple[Manifest, Path]) -> None:
    manifest, folder = data
    path = folder / manifest.splits["train"].shards[1].path
    whole = path.read_bytes()
    path.write_bytes(whole[:200] + bytes([whole[200] ^ 1]) + whole[201:])
    with pytest.raises(ValueError, match=r"part-00001.parquet differs from the SHA-256"):
        verify(manifest, folder)
    path.write_bytes(whole[:-5])
    with pytest.raises(ValueError, match=r"part-00001.parquet has \d+ bytes, but the manifest states \d+"):
        verify(manifest, folder)


def test_rows_in_two_splits(data: tuple[Manifest, Path]) -> None:
    manifest, folder = data
    val, test = manifest.splits["val"], manifest.splits["test"]
    taken_twice = replace(manifest, splits=manifest.splits | {"test": val})
    with pytest.raises(ValueError, match=r"shards hold \d+ of input rows \d+ to \d+; expected all rows from \d+ on"):
        verify(taken_twice, folder)
    assert test.rows
    for names, message in (
        (("test",), r"shards hold \d+ of input rows 3\d\d to \d+; expected all rows from 3"),
        (("val", "test"), "the splits hold 320 of 400 rows"),
    ):
        left_out = {name: replace(manifest.splits[name], rows=0, shards=()) for name in names}
        with pytest.raises(ValueError, match=message):
            verify(replace(manifest, splits=manifest.splits | left_out), folder)
    train = manifest.splits["train"]
    turned = replace(manifest, splits=manifest.splits | {"train": replace(train, shards=train.shards[::-1])})
    with pytest.raises(ValueError, match=f"{train.shards[-2].path} starts before the end of the shard listed before it"):
        verify(turned, folder)


def test_shard_copied_over_another(tmp_path: Path, write_log: Callable[..., Path]) -> None:
    """Counts and checksums are correct, but rows are in two splits."""
    manifest, folder = make(write_log(ROWS), tmp_path / "data"), tmp_path / "data"
    (val,), (test,) = manifest.splits["val"].shards, manifest.splits["test"].shards
    shutil.copy(folder / val.path, folder / test.path)
    copied = replace(test, bytes=val.bytes, sha256=val.sha256)
    tampered = replace(manifest, splits=manifest.splits | {"test": replace(manifest.splits["test"], shards=(copied,))})
    with pytest.raises(
        ValueError, match=r"test/part-00000.parquet doesn't hold the rows that the manifest states, but those of anoth"
    ):
        verify(tampered, folder)


def with_vocabulary(manifest: Manifest, folder: Path, change: Callable[[Path, Path], None]) -> Manifest:
    """Change C3's vocabulary and table; return the manifest with their new checksums."""
    column = manifest.categorical_columns[2]
    assert column.vocabulary
    assert column.table
    change(folder / column.vocabulary.path, folder / column.table.path)
    vocabulary, table = (describe_file(file.path, folder, rows=file.rows) for file in (column.vocabulary, column.table))
    return with_column(manifest, replace(column, vocabulary=vocabulary, table=table))


def with_column(manifest: Manifest, column: CategoricalColumn) -> Manifest:
    columns = manifest.categorical_columns
    return replace(manifest, categorical_columns=(*columns[:2], column, *columns[3:]))


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
        (lambda words, table: rewritten(words, lambda frame: frame[:0]), r"C3 has \d+ embeddings, but its vocabulary has 0 values"),
        (
            lambda words, table: rewritten(words, lambda frame: frame.assign(count=frame["count"] + 10)),
            r"training rows hold \d+ ids of C3, but its vocabulary counts \d+",
        ),
        (lambda words, table: table.write_bytes(b"junk"), r"C3.table is not a table of \d+ values"),
        (lambda words, table: table.write_bytes(bytes(table.stat().st_size)), "C3.table is not a table of"),
        (lambda words, table: table.write_bytes(b"\1" * table.stat().st_size), "C3.table is not a table of"),
    ],
)
def test_junk_as_vocabulary(data: tuple[Manifest, Path], change: Callable[[Path, Path], None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        verify(with_vocabulary(*data, change), data[1])


def test_missing_vocabulary(data: tuple[Manifest, Path]) -> None:
    manifest, folder = data
    without = with_column(manifest, replace(manifest.categorical_columns[2], vocabulary=None, table=None))
    with pytest.raises(ValueError, match="the manifest names no vocabulary of C3"):
        verify(without, folder)


def test_sums_of_weights_and_labels(tmp_path: Path) -> None:
    columns = tuple(
        Column(name=name, kind=kind)  # type: ignore[arg-type]
        for name, kind in {"click": "label", "buy": "label", "w": "weight", "c": "hex"}.items()
    )
    (tmp_path / "log").write_text("1,0,0.5,1\n0,1,2,1\n" * 20)
    manifest = make(tmp_path / "log", tmp_path / "data", schema=LogSchema(columns=columns, separator=","))
    assert manifest.weight is not None
    means = manifest.weight.split_means | {"test": 0.5}
    with pytest.raises(ValueError, match=r"test holds weights that sum to .*, but the mean of w is stated as 0.5"):
        verify(replace(manifest, weight=replace(manifest.weight, split_means=means)), tmp_path / "data")
    buy = replace(manifest.other_labels[0], split_means=manifest.other_labels[0].split_means | {"val": 0.9})
    with pytest.raises(ValueError, match=r"val holds .* labels of 1, but the mean of buy is stated as 0\.9"):
        verify(replace(manifest, other_labels=(buy,)), tmp_path / "data")
