"""Verification of a data set against its manifest, which has the size and the SHA-256 of every file."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from data_pipeline.errors import UserError
from data_pipeline.manifest import REMEDY, Manifest, check_file, check_shards, files_of

_THREADS = 4


def verify(manifest: Manifest, folder: Path) -> None:
    """Read all files of a data set, and compare them with its manifest.

    Raises:
        ValueError: a file is missing or differs, or a split has other rows than its shards; the message names the first.
    """
    check_shards(manifest, folder)
    files = list(files_of(manifest))
    with ThreadPoolExecutor(_THREADS) as pool:
        checked = pool.map(partial(check_file, folder=folder, contents=True), files)
        for _ in tqdm(checked, total=len(files), desc="verifying", unit="file", disable=None):
            pass


def read_row_groups(path: Path) -> Iterator[tuple[int, pa.Table]]:
    """Read a Parquet file's row groups, each with the number of its first row.

    Raises:
        ValueError: the file or a group can't be read.
    """
    row = 0
    try:
        with pq.ParquetFile(path, memory_map=True) as file:
            for number in range(file.num_row_groups):
                group = file.read_row_group(number, use_threads=False)
                yield row, group
                row += len(group)
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"{path}, from row {row} on, cannot be read ({error}); {REMEDY}") from error
