"""New logs are encoded like the data set's rows, and the result is a data set like any other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from consistency import verify
from random_logs import ROWS, files_of, make, random_rows, read

from data_pipeline.manifest import Manifest, file_sha256, read_manifest
from data_pipeline.schema import criteo_schema, read_schema
from data_pipeline.transform import TransformOptions, transform

WriteLog = Callable[..., Path]


def to_options(data: Path, *logs: Path, **others: object) -> TransformOptions:
    return TransformOptions(inputs=logs, data=data, output=data.parent / "new", **others)  # type: ignore[arg-type]


def checked(options: TransformOptions) -> Manifest:
    """Run a transform and verify its data set; return the manifest."""
    manifest = transform(options)
    verify(manifest, options.output)
    assert read_manifest(options.output) == manifest
    return manifest


def test_transforming_the_original_rows_reproduces_them(data: Path, write_log: WriteLog) -> None:
    """They are split as before, whatever the parts; the manifest differs in what new rows alone don't determine."""
    manifest, source = checked(to_options(data, write_log(ROWS, "again.gz"), part_bytes=7_000)), read_manifest(data)
    for split in ("train", "val", "test"):
        pd.testing.assert_frame_equal(read(data.parent / "new", split), read(data, split))
    assert manifest.transformed is not None
    assert manifest.transformed.data == str(data)
    assert manifest.transformed.manifest_sha256 == file_sha256(data / "manifest.json")
    assert manifest.integer_columns == source.integer_columns
    assert manifest.categorical_columns == tuple(replace(column, distinct=None) for column in source.categorical_columns)
    assert manifest.label == source.label


@pytest.mark.parametrize("split", ["train", "val"])
def test_all_rows_to_one_split_and_without_labels(data: Path, write_log: WriteLog, split: str) -> None:
    manifest = checked(to_options(data, write_log([row[1:] for row in ROWS], "new.tsv"), split=split, part_bytes=20_000))
    assert {name: of_split.rows for name, of_split in manifest.splits.items()} == {"train": 0, "val": 0, "test": 0} | {split: 400}
    assert manifest.label is None
    pd.testing.assert_frame_equal(read(data.parent / "new", split), read(data).drop(columns="label"))


def test_refused(data: Path, write_log: WriteLog) -> None:
    log = write_log(ROWS[:3], "new.tsv")
    with pytest.raises(ValueError, match="`split` is 'all'; choose one of source, train, val, test"):
        to_options(data, log, split="all")
    short = write_log(b"1\t2\n", "short.tsv")
    criteo = criteo_schema(labeled=True)
    renamed = replace(criteo, columns=(criteo.columns[0], replace(criteo.columns[1], name="J1"), *criteo.columns[2:]))
    with pytest.raises(ValueError, match=r"other columns than the logs of .*data: J1 \(integer\) where I1 \(integer\) is expected"):
        transform(to_options(data, log, schema=renamed))
    with pytest.raises(ValueError, match="holds no well-formed lines; give logs with rows to encode"):
        transform(to_options(data, short, schema=criteo, max_bad_rows=5))
    (data / "vocabulary" / "C7.table").unlink()
    with pytest.raises(ValueError, match=r"C7\.table does not exist, but the manifest lists it"):
        transform(to_options(data, log))
    assert not (data.parent / "new").exists()


def test_extended(data: Path, write_log: WriteLog) -> None:
    """Known values keep their ids, and new ones of the training split get the next ids by count unless rare, day after day."""
    source = read_manifest(data)
    first = source.categorical_columns[0]
    new = [["1", *["3"] * 13, code, *["0"] * 25] for code in ["aaaa0001"] * 2 + ["aaaa0002"] * 5 + ["aaaa0003"] + ["aaaa0000"] * 2]
    log = write_log([*ROWS[:320], *new], "new.tsv")
    options = to_options(data, log, split="train", extend=True, part_bytes=20_000)
    manifest = checked(options)
    column = manifest.categorical_columns[0]
    assert (column.num_embeddings, column.grown) == (first.num_embeddings + 3, (first.num_embeddings,))
    rows = read(options.output, "train")
    pd.testing.assert_frame_equal(rows.loc[:319, "C2":], read(data, "train").loc[:, "C2":])  # type: ignore[misc]
    known = read(data, "train")["C1"]
    assert (rows["C1"][:320][known > 0] == known[known > 0]).all()
    ends = [first.num_embeddings + row for row in (0, 1, 2)]  # by count, then by value
    assert rows["C1"][320:].tolist() == [ends[2]] * 2 + [ends[0]] * 5 + [0] + [ends[1]] * 2
    words, before = (pd.read_parquet(folder / "vocabulary" / "C1.parquet") for folder in (options.output, data))
    pd.testing.assert_frame_equal(words[: len(before)], before)
    assert words["count"][len(before) :].tolist() == [5, 2, 2]
    unchanged = manifest.categorical_columns[1]
    assert (unchanged.vocabulary, unchanged.grown) == (source.categorical_columns[1].vocabulary, ())
    more = write_log([["1", *["3"] * 13, "bbbb0001", *["0"] * 25]] * 3, "more.tsv")
    tomorrow = replace(options, data=options.output, output=data.parent / "tomorrow", inputs=(more,))
    again = checked(tomorrow).categorical_columns[0]
    assert (again.num_embeddings, again.grown) == (column.num_embeddings + 1, (first.num_embeddings, column.num_embeddings))
    plain = checked(replace(options, extend=False, output=data.parent / "plain"))
    assert plain.categorical_columns[0].num_embeddings == first.num_embeddings
    tested = checked(replace(options, split="test", output=data.parent / "tested"))
    assert tested.categorical_columns[0].grown == ()


def test_extended_run_resumes(data: Path, write_log: WriteLog, monkeypatch: pytest.MonkeyPatch) -> None:
    new = random_rows(200, seed=9)
    options = to_options(data, write_log(new * 2, "new.tsv"), extend=True, part_bytes=9_000)
    monkeypatch.setattr("data_pipeline.transform.write_logs", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        transform(options)
    monkeypatch.undo()
    checked(options)
    whole = replace(options, output=data.parent / "whole")
    checked(whole)
    assert files_of(options.output) == files_of(whole.output)


SCHEMA = """
separator = ","
header = true
[columns]
click = "label"
buy = "label"
w = "weight"
rating = { kind = "float", transform = "standardize" }
seen = { kind = "list", max_length = 2 }
user = { kind = "category", hash_buckets = 50 }
"""


def test_other_columns_and_settings_are_refused(tmp_path: Path) -> None:
    """They would give numbers that differ from those that the model was trained on; labels are all there or none."""
    log, data, schema = tmp_path / "log.csv", tmp_path / "data", tmp_path / "schema.toml"
    schema.write_text(SCHEMA)
    log.write_text("click,buy,w,rating,seen,user\n" + "1,0,0.5,3,a|b,u\n" * 9)
    make(log, data, schema=read_schema(schema))
    for before, after, message in (
        (', transform = "standardize"', "", r"rating \(float\) where rating \(float, transform standardize\) is expected"),
        ("max_length = 2", "max_length = 3", r"seen \(list, max_length 3\) where seen \(list, max_length 2\) is expected"),
        ("hash_buckets = 50", "hash_buckets = 60", r"user \(category, hash_buckets 60\) where user \(category, hash_buckets 50\)"),
    ):
        schema.write_text(SCHEMA.replace(before, after))
        with pytest.raises(ValueError, match=message):
            transform(to_options(data, log, schema=read_schema(schema)))
    log.write_text("rating,seen,user\n3,a|b,u\n")
    manifest = checked(to_options(data, log))
    assert (manifest.labels, manifest.weight) == ((), None)
    log.write_text("click,w,rating,seen,user\n1,0.5,3,a|b,u\n")
    with pytest.raises(ValueError, match=r"log.csv has the labels label where .* has click, buy; give logs with all of these"):
        transform(replace(to_options(data, log), output=tmp_path / "one"))
