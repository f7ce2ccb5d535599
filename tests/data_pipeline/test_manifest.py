"""A manifest is read completely or refused with the key at fault; verify names files that differ from it, and inspect shows it.

Logs and data sets at URLs are read as local ones are, with one line for whatever can't be read.
"""

import dataclasses
import errno
import gzip
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from click.testing import CliRunner
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from random_logs import ROWS, files_of, make, to_text
from refusals import refuse

from comera_rec.cli.data import inspect
from comera_rec.data import ParquetBatches
from data_pipeline import inspection
from data_pipeline.manifest import Manifest, check_shards, read_manifest, verify
from data_pipeline.sources import by_number, expand, open_log


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
        (lambda m: m["rows"].pop("in"), "manifest.json: rows.in: Field required"),
        (lambda m: m["splits"].pop("val"), "manifest.json: splits.val: Field required"),
        (lambda m: m["categorical_columns"][2].update(num_embeddings="many"), "categorical_columns.2.num_embeddings: .*integer"),
        (lambda m: m["splits"]["train"]["shards"][0].update(path="/etc/passwd"), "json: /etc/passwd is outside of .*data; run"),
        (lambda m: m["splits"]["test"]["shards"][0].update(path="test/../../x"), "json: test/../../x is outside of .*data"),
        (lambda m: m["categorical_columns"][0]["vocabulary"].update(path="../x"), "json: ../x is outside of .*data"),
        (lambda m: m.update(format_version=99), "format_version: Input should be 1; run `comera preprocess` again"),
    ],
)
def test_bad_manifest(data: Path, change: Callable[[dict], object], message: str) -> None:
    edit(data, change)
    refuse(message, read_manifest, data)


def test_no_manifest_and_no_json_object(data: Path) -> None:
    for text in ("", "{", "[]"):
        (data / "manifest.json").write_text(text)
        refuse(r"manifest.json: the file: .*run `comera preprocess` again", read_manifest, data)
    (data / "manifest.json").unlink()
    refuse(r"manifest.json does not exist: .* make one with `comera preprocess`", read_manifest, data)


def test_verify_other_bytes_truncation_and_numbers_of_rows(data: Path) -> None:
    manifest = read_manifest(data)
    verify(manifest, data)
    path = data / manifest.splits["train"].shards[1].path
    whole = path.read_bytes()
    path.write_bytes(whole[:200] + bytes([whole[200] ^ 1]) + whole[201:])
    refuse(r"part-00001.parquet differs from the SHA-256", verify, manifest, data)
    path.write_bytes(whole[:-5])
    refuse(r"part-00001.parquet has \d+ bytes, but the manifest states \d+", verify, manifest, data)
    edit(data, lambda m: m["splits"]["train"].update(rows=319))
    refuse("split train states 319 rows, but its shards 320", check_shards, read_manifest(data), data)


def test_table_of_columns(write_log: Callable[..., Path], tmp_path: Path) -> None:
    values = [f"{rank:x}" for rank in (1, 2, 3, 4) for _ in range(256 // rank)]
    rows = [["1", "-7", *[""] * 12, value] + [""] * 25 for value in values]
    manifest = make(write_log(rows), tmp_path / "data", val_fraction=0, test_fraction=0)
    text = inspection.to_text(manifest, tmp_path / "data")
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line}
    assert lines["train"] == ["train", str(len(values)), "rows", "label", "rate", "1.0000"]
    assert (lines["I1"], lines["I2"]) == (["I1", "0.0%", "-7", "-7"], ["I2", "100.0%"])
    assert lines["C1"] == ["C1", "4", "5", "0.0%", f"{256 / len(values):.1%}", *["100.0%"] * 4]
    assert CliRunner().invoke(inspect, ["--data", str(tmp_path / "data")]).output == text + "\n"


def test_same_data_set_as_from_disk(memory: Any, tmp_path: Path) -> None:
    contents = {"day_2.gz": gzip.compress(to_text(ROWS[:150])), "day_10": to_text(ROWS[150:])}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        memory.pipe(f"/logs/{name}", content)
    with zipfile.ZipFile(tmp_path / "logs.zip", "w") as archive:
        archive.write(tmp_path / "day_10", "day_10")
    assert open_log(f"zip://day_10::file://{tmp_path}/logs.zip").read() == contents["day_10"]
    assert expand([f"file://{tmp_path}/day_1*"]) == (tmp_path / "day_10",)
    urls = by_number(expand(["memory://logs/day_*"]))
    assert urls == ("memory:///logs/day_2.gz", "memory:///logs/day_10")
    for name, inputs in (("remote", urls), ("local", tuple(tmp_path / name for name in contents))):
        make(inputs, tmp_path / name, part_bytes=10_000)
    assert files_of(tmp_path / "remote") == files_of(tmp_path / "local")


def test_training_reads_a_data_set_at_a_url(memory: Any, made_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "memory://bucket/data"
    memory.put(str(made_data), "/bucket/data", recursive=True)
    assert read_manifest(url) == read_manifest(made_data)
    remote, others = (list(ParquetBatches(data, "train", batch_size=64, shuffle=True)) for data in (url, made_data))
    assert len(remote) == 5
    for one, other in zip(remote, others, strict=True):
        assert one.dense.equal(other.dense)
        assert one.labels.equal(other.labels)
        assert one.sparse.values().equal(other.sparse.values())
    shard = "/bucket/data/" + read_manifest(url).splits["train"].shards[0].path
    memory.pipe_file(shard, memory.cat_file(shard)[:-1])
    refuse(r"bucket/data/train/part-00000.parquet has \d+ bytes, but the", ParquetBatches, url, "train", batch_size=64)
    memory.rm_file(shard)
    refuse(r"data/train/part-00000.parquet does not exist, but the manifest lists it", check_shards, read_manifest(url), url)
    refuse(r"memory:/bucket/data is a URL, which only training and evaluation read; copy", read_manifest, Path(url))
    refuse(r"memory://bucket/other is not a preprocessed data set", read_manifest, "memory://bucket/other")

    denied = PermissionError(errno.EACCES, "Access Denied")
    monkeypatch.setattr(MemoryFileSystem, "info", Mock(side_effect=denied))
    refuse(r"cannot read memory://bucket/data/manifest.json: .*; check its name and your credent", read_manifest, url)


@pytest.mark.parametrize(
    ("owner", "method"), [(MemoryFileSystem, "info"), (MemoryFileSystem, "open"), (MemoryFile, "read"), (MemoryFileSystem, "glob")]
)
def test_errors_of_libraries(memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, method: str) -> None:
    memory.pipe("/logs/day_0", b"x")
    message = r"cannot read `input` memory://logs/day_.: LookupError: unable to locate credentials; check the file"
    monkeypatch.setattr(owner, method, Mock(side_effect=LookupError("unable to locate credentials")))  # no OSError, as botocore's
    url = "memory://logs/day_*" if method == "glob" else "memory://logs/day_0"
    refuse(message, lambda: make(expand([url]), tmp_path / "data"))
