"""Five thousand parts, as for 320 GB of text, under `ulimit -n 1024`: the number of open files doesn't grow with the parts."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_pipeline.manifest import Manifest
from data_pipeline.preprocess import PreprocessOptions, preprocess
from data_pipeline.schema import Column, LogSchema
from data_pipeline.verify import verify

PARTS, ROWS_PER_PART = 5000, 4
MOST_FILES, MOST_MAPPINGS = 64, 256  # in addition to those before
SCHEMA = LogSchema(columns=(Column(name="label", kind="label"), Column(name="shop", kind="hex")))
CELLS = [(row % 2, f"{row * row % 1009:08x}") for row in range(PARTS * ROWS_PER_PART)]


def files_and_mappings() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_bytes().count(b"\n")


@contextmanager
def peaks() -> Iterator[list[int]]:
    """Run the block under `ulimit -n 1024`; then yield how far the peaks of open files and mappings exceeded those before."""
    before = most = files_and_mappings()
    stop, result = threading.Event(), list[int]()

    def watch() -> None:
        nonlocal most
        while not stop.wait(0.01):
            most = tuple(map(max, most, files_and_mappings()))  # type: ignore[assignment]

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield result
    finally:
        stop.set()
        watcher.join()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    result += [high - low for high, low in zip(most, before, strict=True)]


def train_rows(manifest: Manifest, folder: Path) -> pa.Table:
    return pa.concat_tables([pq.read_table(folder / shard.path) for shard in manifest.splits["train"].shards])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["text", "parquet"])
def test_few_files_and_mappings(tmp_path: Path, kind: str) -> None:
    log = tmp_path / "log"
    if kind == "text":
        lines = [f"{label}\t{shop}\n".encode() for label, shop in CELLS]
        log.write_bytes(b"".join(lines))
        part_bytes = ROWS_PER_PART * len(lines[0])
    else:
        columns = dict(zip(("label", "shop"), zip(*CELLS, strict=True), strict=True))
        pq.write_table(pa.table(columns), log, row_group_size=ROWS_PER_PART)
        metadata = pq.read_metadata(log)
        part_bytes = max(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
    whole = PreprocessOptions(inputs=(log,), output=tmp_path / "whole", schema=SCHEMA, val_fraction=0, test_fraction=0)
    expected = train_rows(preprocess(whole), whole.output)
    with peaks() as peak:
        manifest = preprocess(replace(whole, output=tmp_path / "data", part_bytes=part_bytes, workers=2))
    files, mappings = peak
    print(f"{kind}: {files} files, {mappings} mappings more at the peak")
    assert len(manifest.splits["train"].shards) == PARTS
    assert files <= MOST_FILES
    assert mappings <= MOST_MAPPINGS
    verify(manifest, tmp_path / "data")
    assert train_rows(manifest, tmp_path / "data").equals(expected)
