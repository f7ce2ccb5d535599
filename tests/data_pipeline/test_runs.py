"""Runs of values are counted and merged as by a dictionary, whatever the memory, and with few open files."""

from __future__ import annotations

import os
import resource
import tempfile
from collections import Counter as Counts
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_logs import random_rows, to_text

from data_pipeline import runs as runs_module
from data_pipeline.options import PreprocessOptions
from data_pipeline.preprocess import preprocess
from data_pipeline.runs import Run, count_keys, merge, write_run

DTYPES = [np.dtype(np.uint32), np.dtype(np.uint64)]


def merged(runs: Sequence[Run], folder: Path, column: int, dtype: np.dtype, entries: int) -> dict[int, int]:
    pairs: list[tuple[int, int]] = []
    for keys, counts in merge(runs, folder, column, key_dtype=dtype, entries=entries):
        pairs += zip(keys.tolist(), counts.tolist(), strict=True)
    assert [key for key, _ in pairs] == sorted({key for key, _ in pairs}), "distinct and ascending"
    return dict(pairs)


@settings(max_examples=100)
@given(
    parts=st.lists(st.lists(st.one_of(st.integers(0, 5), st.integers(0, 2**32 - 1)), max_size=30), max_size=4),
    dtype=st.sampled_from(DTYPES),
    entries=st.integers(1, 40),
    trains=st.lists(st.booleans(), min_size=4, max_size=4),
    times=st.sampled_from([1, 1 << 32]),
)
def test_counts_equal_a_dictionary(parts: list[list[int]], dtype: np.dtype, entries: int, trains: list[bool], times: int) -> None:
    """Also counts beyond 32 bits."""
    with tempfile.TemporaryDirectory() as name:
        folder, runs, expected = Path(name), list[Run](), Counts[int]()
        for number, (keys, counts) in enumerate(zip(parts, trains, strict=False)):
            counted = [count_keys(np.array(column, dtype)) for column in (keys, keys[:1])]
            columns = [[(values, count * np.uint64(times))] for values, count in counted]
            runs.append(replace(write_run(folder / str(number), columns, count_bytes=4 if times == 1 else 8), trains=counts))
            expected.update({key: counts * times * count for key, count in Counts(keys).items()})
        assert merged(runs, folder, 0, dtype, entries) == dict(expected)
        assert merged(runs, folder, 1, dtype, entries).keys() == {keys[0] for keys in parts if keys}


@contextmanager
def few_files(more: int) -> Iterator[None]:
    """Allow at most `more` open files in addition to the current ones."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_many_parts_with_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of parts, merged in levels, give the same data set as when merged at once."""
    log = tmp_path / "log"
    log.write_bytes(to_text(random_rows(300)))
    options = {"inputs": (log,), "part_bytes": 600, "workers": 2}
    at_once = preprocess(PreprocessOptions(output=tmp_path / "at once", **options))
    monkeypatch.setattr(runs_module, "FAN_IN", 8)
    with few_files(40):
        manifest = preprocess(PreprocessOptions(output=tmp_path / "data", **options))
    assert sum(len(split.shards) for split in manifest.splits.values()) >= 80
    assert manifest == at_once
