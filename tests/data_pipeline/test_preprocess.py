"""The data set equals a slow and obvious reference, cell by cell, however the text arrives."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from random_logs import make, random_rows, to_text

from data_pipeline import parts, shards
from data_pipeline.manifest import read_manifest
from data_pipeline.parts import count_parts, read_parts
from data_pipeline.preprocess import PreprocessOptions, preprocess
from data_pipeline.splits import SplitKind

WriteLog = Callable[..., Path]


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


def test_manifest_accounts_for_everything(tmp_path: Path, write_log: WriteLog) -> None:
    rows = random_rows(1000)
    text = to_text(rows[:400]) + b"garbage\n" + to_text(rows[400:])
    output = tmp_path / "data"
    manifest = make(write_log(text), output, max_bad_rows=1)
    assert manifest == read_manifest(output)
    (log,) = manifest.inputs
    assert (log.name, log.bytes, log.rows_in, log.rows_rejected) == ("log.tsv", len(text), 1001, 1)
    assert str(tmp_path) not in (output / "manifest.json").read_text()

    labels = np.array([int(row[0]) for row in rows])
    assert manifest.label is not None
    assert manifest.label.mean == pytest.approx(labels.mean())
    assert manifest.label.split_means == pytest.approx(
        {"train": labels[:800].mean(), "val": labels[800:900].mean(), "test": labels[900:].mean()}
    )
    for position, categorical in enumerate(manifest.categorical_columns, start=14):
        assert categorical.distinct == len({int(row[position], 16) for row in rows if row[position]})


@pytest.mark.parametrize("split", ["chronological", "random"])
def test_threads_and_room_do_not_change_the_data_set(
    tmp_path: Path, write_log: WriteLog, monkeypatch: pytest.MonkeyPatch, split: SplitKind
) -> None:
    """Several threads and row groups, and vocabularies freed while they are read."""
    rows = random_rows(300)
    options = {"inputs": (write_log(to_text(rows[:200]) + b"bad\n" + to_text(rows[200:])),), "split": split, "max_bad_rows": 1}
    monkeypatch.setattr(shards, "ROW_GROUP_ROWS", 30)
    expected = preprocess(PreprocessOptions(output=tmp_path / "at once", part_bytes=20_000, workers=1, **options))
    monkeypatch.setattr(PreprocessOptions, "table_bytes", 4000)
    assert preprocess(PreprocessOptions(output=tmp_path / "data", part_bytes=20_000, workers=3, **options)) == expected
    sizes = [pq.read_metadata(path).row_group(0).num_rows for path in (tmp_path / "data" / "train").iterdir()]
    assert max(sizes) <= 30 < expected.splits["train"].shards[0].rows


def test_one_row_is_a_training_row(tmp_path: Path, write_log: WriteLog) -> None:
    manifest = make(write_log(random_rows(1)), tmp_path / "data")
    assert {name: split.rows for name, split in manifest.splits.items()} == {"train": 1, "val": 0, "test": 0}
    assert manifest.label is not None
    assert manifest.label.split_means["val"] is None
