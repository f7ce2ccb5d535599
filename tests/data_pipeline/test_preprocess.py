"""The data set equals a slow and obvious reference, cell by cell, however the text arrives."""

from __future__ import annotations

import gzip
import itertools
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_logs import Rows, files_of, random_rows, read, to_text
from test_data_sets import column_of

from data_pipeline import counts, job, parts
from data_pipeline.manifest import check_shards, read_manifest
from data_pipeline.parse import parse_blocks
from data_pipeline.parts import count_parts, read_parts
from data_pipeline.preprocess import PreprocessOptions, preprocess
from data_pipeline.schema import criteo_schema
from data_pipeline.splits import SplitKind

INTEGERS = [f"I{i}" for i in range(1, 14)]
CATEGORIES = [f"C{i}" for i in range(1, 27)]
WriteLog = Callable[..., Path]


def reference(rows: Rows, *, min_count: int = 2, val_fraction: float = 0.1, test_fraction: float = 0.1) -> dict[str, pd.DataFrame]:
    """Compute what each split must contain, one cell at a time."""
    schema = criteo_schema(labeled=len(rows[0]) == 40)
    val, test = int(len(rows) * val_fraction), int(len(rows) * test_fraction)
    train = len(rows) - val - test
    read_cell = {"label": int, "integer": int, "hex": str}
    cells = [
        {c.name: read_cell[c.kind](cell) if cell else None for c, cell in zip(schema.columns, row, strict=True)} for row in rows
    ]
    frame = pd.DataFrame({column.name: column_of(cells, column, train, min_count) for column in schema.columns})
    return {"train": frame[:train], "val": frame[train : train + val], "test": frame[train + val :]}


def assert_equals_reference(folder: Path, rows: Rows, **options: float) -> None:
    manifest = read_manifest(folder)
    check_shards(manifest, folder, contents=True)
    for split, expected in reference(rows, **options).items():
        assert manifest.splits[split].rows == len(expected)
        if len(expected):
            actual = read(folder, split)
            dtypes = ["int8" if name == "label" else "float32" if name in INTEGERS else "int32" for name in expected]
            assert actual.dtypes.astype(str).to_list() == dtypes
            pd.testing.assert_frame_equal(actual, expected.reset_index(drop=True), check_dtype=False, rtol=1e-6)


CELL_COUNT = st.sampled_from(["", "0", "-1", "7", "007", "-0", "-2147483648", "2147483647"])
CELL_CATEGORY = st.sampled_from(["", "0", "00000000", "ffffffff", "FFFFFFFF", "a", "0A", "1", "68fd1e64"])


@st.composite
def adversarial_rows(draw: st.DrawFn) -> Rows:
    label = [st.sampled_from(["0", "1"])] if draw(st.booleans()) else []
    row = st.tuples(*label, *[CELL_COUNT] * 13, *[CELL_CATEGORY] * 26).map(list)
    return draw(st.lists(row, min_size=1, max_size=12))


@settings(max_examples=20, deadline=None)
@given(
    rows=adversarial_rows(),
    newline=st.sampled_from(["\n", "\r\n"]),
    ended=st.booleans(),
    compress=st.booleans(),
    part_bytes=st.integers(50, 2000),
    min_count=st.integers(1, 3),
    fractions=st.sampled_from([(0.1, 0.1), (0.0, 0.0), (0.4, 0.5), (0.25, 0.0)]),
)
def test_equals_reference_on_adversarial_rows(
    rows: Rows, newline: str, ended: bool, compress: bool, part_bytes: int, min_count: int, fractions: tuple[float, float]
) -> None:
    text = to_text(rows, newline)
    text = text if ended else text.removesuffix(newline.encode())
    with tempfile.TemporaryDirectory() as folder:
        log, output = Path(folder, "log"), Path(folder, "data")
        log.write_bytes(gzip.compress(text) if compress else text)
        options = {"min_count": min_count, "val_fraction": fractions[0], "test_fraction": fractions[1]}
        preprocess(PreprocessOptions(inputs=(log,), output=output, part_bytes=part_bytes, **options))
        assert_equals_reference(output, rows, **options)


def test_same_data_set_however_the_text_arrives(tmp_path: Path, write_log: WriteLog) -> None:
    """Plain, gzipped, in gzip members, repeated, by one or more threads: files are identical except for the logs' sizes."""
    rows = random_rows(600)
    members = gzip.compress(to_text(rows[:100])) + gzip.compress(to_text(rows[100:]))
    arrivals = {
        "plain": (write_log(rows), 2),
        "again": (write_log(rows), 2),
        "alone": (write_log(rows), 1),
        "gzip": (write_log(rows, "log.gz"), 2),
        "members": (write_log(members, "day_0"), 3),
    }
    results = {}
    for name, (log, workers) in arrivals.items():
        output = tmp_path / name
        preprocess(PreprocessOptions(inputs=(log,), output=output, part_bytes=20_000, workers=workers))
        results[name] = {path: content for path, content in files_of(output).items() if path != "manifest.json"}
    assert (tmp_path / "plain/manifest.json").read_bytes() == (tmp_path / "alone/manifest.json").read_bytes()
    first = results["plain"]
    assert len(first) > 26 + 3, "several shards per split"
    assert all(files == first for files in results.values())


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
    manifest = preprocess(PreprocessOptions(inputs=(write_log(text),), output=output, max_bad_rows=1))
    assert manifest == read_manifest(output)
    assert (manifest.rows.read, manifest.rows.written, manifest.rows.rejected) == (1001, 1000, 1)
    (log,) = manifest.inputs
    assert (log.name, log.bytes, log.rows_in, log.rows_rejected) == ("log.tsv", len(text), 1001, 1)
    assert [(line.file, line.line) for line in manifest.rejected_lines] == [("log.tsv", 401)]
    assert str(tmp_path) not in (output / "manifest.json").read_text()

    labels = np.array([int(row[0]) for row in rows])
    assert manifest.label is not None
    assert manifest.label.mean == pytest.approx(labels.mean())
    assert manifest.label.split_means == pytest.approx(
        {"train": labels[:800].mean(), "val": labels[800:900].mean(), "test": labels[900:].mean()}
    )
    for position, column in enumerate(manifest.integer_columns, start=1):
        train = [int(row[position]) for row in rows[:800] if row[position]]
        assert (column.name, column.min, column.max, column.offset) == (f"I{position}", min(train), max(train), 2 - min(train))
        assert column.missing == sum(not row[position] for row in rows)
    for position, categorical in enumerate(manifest.categorical_columns, start=14):
        assert categorical.distinct == len({int(row[position], 16) for row in rows if row[position]})
        assert categorical.missing == sum(not row[position] for row in rows)
        vocabulary = pd.read_parquet(output / categorical.vocabulary.path)
        counts = Counter(int(row[position], 16) for row in rows[:800] if row[position])
        assert categorical.num_embeddings == len(vocabulary) + 1
        assert dict(zip(vocabulary["value"], vocabulary["count"], strict=True)) == {v: n for v, n in counts.items() if n >= 2}
        assert vocabulary["count"].is_monotonic_decreasing


@pytest.mark.parametrize("split", ["chronological", "random"])
def test_blocks_and_room_do_not_change_the_data_set(
    tmp_path: Path, write_log: WriteLog, monkeypatch: pytest.MonkeyPatch, split: SplitKind
) -> None:
    """Many blocks per part, runs written before a part ends, and vocabularies freed while they are read."""
    rows = random_rows(300)
    options = {"inputs": (write_log(to_text(rows[:200]) + b"bad\n" + to_text(rows[200:])),), "split": split, "max_bad_rows": 1}
    expected = preprocess(PreprocessOptions(output=tmp_path / "at once", part_bytes=20_000, **options))
    monkeypatch.setattr(job, "parse_blocks", partial(parse_blocks, block_bytes=3000))
    monkeypatch.setattr(counts, "_COUNTER_BYTES", 2000)
    monkeypatch.setattr(PreprocessOptions, "table_bytes", 4000)
    assert preprocess(PreprocessOptions(output=tmp_path / "data", part_bytes=20_000, **options)) == expected


def test_one_row_is_a_training_row(tmp_path: Path, write_log: WriteLog) -> None:
    manifest = preprocess(PreprocessOptions(inputs=(write_log(random_rows(1)),), output=tmp_path / "data"))
    assert {name: split.rows for name, split in manifest.splits.items()} == {"train": 1, "val": 0, "test": 0}
    assert manifest.label is not None
    assert manifest.label.split_means["val"] is None


def test_exact_decimal_fractions(tmp_path: Path, write_log: WriteLog) -> None:
    """0.29 * 100 is 28.999999999999996 in floating point, but means 29 rows."""
    options = PreprocessOptions(inputs=(write_log(random_rows(100)),), output=tmp_path / "data", val_fraction=0.29)
    assert preprocess(options).splits["val"].rows == 29
