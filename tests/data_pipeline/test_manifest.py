"""A manifest is read completely or refused with the key at fault, and shards that differ from it are named."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from random_logs import make, random_rows

from data_pipeline.manifest import Manifest, check_shards, read_manifest


@pytest.fixture
def data(tmp_path: Path, write_log: Callable[..., Path]) -> Path:
    make(write_log(random_rows(50)), tmp_path / "data")
    return tmp_path / "data"


def edit(data: Path, change: Callable[[dict], object]) -> None:
    content = json.loads((data / "manifest.json").read_text())
    change(content)
    (data / "manifest.json").write_text(json.dumps(content))


def test_keys_of_the_file(data: Path) -> None:
    """The keys are a contract, because other tools read them."""
    content = json.loads((data / "manifest.json").read_text())
    assert set(content) == {field.name for field in dataclasses.fields(Manifest)}
    assert content["rows"] == {"in": 50, "written": 50, "rejected": 0}
    assert set(content["splits"]["train"]["shards"][0]) == {"path", "rows", "bytes", "sha256"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop("rows"), "manifest.json: rows: Field required"),
        (lambda m: m["rows"].pop("in"), "manifest.json: rows.in: Field required"),
        (lambda m: m["splits"].pop("val"), "manifest.json: splits.val: Field required"),
        (lambda m: m["categorical_columns"][2].pop("num_embeddings"), "categorical_columns.2.num_embeddings: Field required"),
        (lambda m: m["categorical_columns"][2].update(num_embeddings="many"), "categorical_columns.2.num_embeddings: .*integer"),
        (lambda m: m.update(format_version=99), "format_version: Input should be 1; run `comera preprocess` again"),
        (lambda m: m.pop("format"), "format: Field required"),
    ],
)
def test_bad_manifest(data: Path, change: Callable[[dict], object], message: str) -> None:
    edit(data, change)
    with pytest.raises(ValueError, match=message) as caught:
        read_manifest(data)
    assert "\n" not in str(caught.value)


def test_no_manifest_and_no_json_object(data: Path) -> None:
    for text in ("", "{", "[]"):
        (data / "manifest.json").write_text(text)
        with pytest.raises(ValueError, match=r"manifest.json: the file: .*run `comera preprocess` again"):
            read_manifest(data)
    (data / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"manifest.json does not exist: .* make one with `comera preprocess`"):
        read_manifest(data)


def test_stated_rows(data: Path) -> None:
    edit(data, lambda m: m["splits"]["train"]["shards"][0].update(rows=39))
    with pytest.raises(ValueError, match="split train states 40 rows, but its shards 39"):
        check_shards(read_manifest(data), data)


@pytest.mark.parametrize("path", ["../other/part-00000.parquet", "train/../../x", "/etc/passwd"])
def test_paths_stay_in_the_folder(data: Path, path: str) -> None:
    edit(data, lambda m: m["splits"]["train"]["shards"][0].update(path=path))
    with pytest.raises(ValueError, match=rf"manifest.json: {path} is outside of .*data; run `comera preprocess` again"):
        read_manifest(data)
    edit(data, lambda m: m["splits"]["train"]["shards"][0].update(path="train/part-00000.parquet"))
    edit(data, lambda m: m["categorical_columns"][0]["vocabulary"].update(path=path))
    with pytest.raises(ValueError, match=rf"manifest.json: {path} is outside of .*data"):
        read_manifest(data)
