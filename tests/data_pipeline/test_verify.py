"""`verify` finds files that differ from the manifest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from random_logs import make, random_rows

from data_pipeline.manifest import Manifest
from data_pipeline.verify import verify

ROWS = random_rows(400)


@pytest.fixture
def data(tmp_path: Path, write_log: Callable[..., Path]) -> tuple[Manifest, Path]:
    return make(write_log(ROWS), tmp_path / "data", part_bytes=10_000), tmp_path / "data"


def test_whole(data: tuple[Manifest, Path]) -> None:
    verify(*data)


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
