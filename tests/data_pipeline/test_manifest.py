"""A manifest is read completely or refused with the key at fault; verify names files that differ from it, and inspect shows it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from random_logs import make

from comera_rec.cli.data import inspect
from data_pipeline.inspection import to_text
from data_pipeline.manifest import Manifest, check_shards, read_manifest, verify


def edit(data: Path, change: Callable[[dict], object]) -> None:
    content = json.loads((data / "manifest.json").read_text())
    change(content)
    (data / "manifest.json").write_text(json.dumps(content))


def test_keys_of_the_file(data: Path) -> None:
    """The keys are a contract, because other tools read them."""
    content = json.loads((data / "manifest.json").read_text())
    assert set(content) == {field.name for field in dataclasses.fields(Manifest)}
    assert content["rows"] == {"in": 400, "written": 400, "rejected": 0}
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
    edit(data, lambda m: m["splits"]["train"].update(rows=319))
    with pytest.raises(ValueError, match="split train states 319 rows, but its shards 320"):
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


def test_verify_other_bytes_and_truncation(data: Path) -> None:
    manifest = read_manifest(data)
    verify(manifest, data)
    path = data / manifest.splits["train"].shards[1].path
    whole = path.read_bytes()
    path.write_bytes(whole[:200] + bytes([whole[200] ^ 1]) + whole[201:])
    with pytest.raises(ValueError, match=r"part-00001.parquet differs from the SHA-256"):
        verify(manifest, data)
    path.write_bytes(whole[:-5])
    with pytest.raises(ValueError, match=r"part-00001.parquet has \d+ bytes, but the manifest states \d+"):
        verify(manifest, data)


def test_table_of_columns(write_log: Callable[..., Path], tmp_path: Path) -> None:
    values = [f"{rank:x}" for rank in (1, 2, 3, 4) for _ in range(256 // rank)]
    rows = [["1", "-7", *[""] * 12, value] + [""] * 25 for value in values]
    manifest = make(write_log(rows), tmp_path / "data", val_fraction=0, test_fraction=0)
    text = to_text(manifest, tmp_path / "data")
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line}
    assert lines["train"] == ["train", str(len(values)), "rows", "label", "rate", "1.0000"]
    assert lines["I1"] == ["I1", "0.0%", "-7", "-7"]
    assert lines["I2"] == ["I2", "100.0%"]
    assert lines["C1"] == ["C1", "4", "5", "0.0%", f"{256 / len(values):.1%}", *["100.0%"] * 4]
    for table in text.split("\n\n")[1:]:
        assert len({len(line) for line in table.splitlines()}) == 1, "columns are aligned"
    assert CliRunner().invoke(inspect, ["--data", str(tmp_path / "data")]).output == text + "\n"
