"""Fixture that writes a log to a file, for all tests of the pipeline."""

from __future__ import annotations

import gzip
import multiprocessing
from collections.abc import Callable
from pathlib import Path

import pytest
from random_logs import Rows, to_text

# Processes then start in milliseconds, so that kills hit runs and not imports.
multiprocessing.get_context("forkserver").set_forkserver_preload(["data_pipeline.preprocess", "pandas", "pytest"])


@pytest.fixture
def write_log(tmp_path: Path) -> Callable[..., Path]:
    """`write_log(rows or bytes, name="log.tsv")` -> the path of a log with that content; .gz compresses."""

    def write(content: Rows | bytes, name: str = "log.tsv") -> Path:
        text = content if isinstance(content, bytes) else to_text(content)
        path = tmp_path / name
        path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
        return path

    return write
