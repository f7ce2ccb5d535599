"""First pass: raw logs, plain or gzipped, to one uncompressed Arrow file that later passes map into memory column by column."""

from __future__ import annotations

import gzip
import os
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
from tqdm import tqdm

from data_pipeline.manifest import InputFile, RejectedLine
from data_pipeline.parse import ParsedChunk, detect_schema, parse_chunk

WORKERS = min(8, os.cpu_count() or 1)
_GZIP_MAGIC = b"\x1f\x8b"
_LONGEST_LINE = 1 << 16
_REJECTED_LINES_KEPT = 100


@dataclass(kw_only=True)
class Rejects:
    """Malformed lines so far: all counted, the first of them kept, and one more than max_bad_rows an error."""

    max_bad_rows: int
    count: int = 0
    lines: list[RejectedLine] = field(default_factory=list)

    def add(self, path: Path, line: int, reason: str) -> None:
        self.count += 1
        if len(self.lines) < _REJECTED_LINES_KEPT:
            self.lines.append(RejectedLine(file=path.name, line=line, reason=reason))
        if self.count > self.max_bad_rows:
            before = f"after {self.max_bad_rows} other malformed lines; " if self.max_bad_rows else ""
            raise ValueError(f"{path}:{line}: {reason}; {before}fix the log, or let lines be dropped with a higher --max-bad-rows")


def check_inputs(paths: tuple[Path, ...]) -> None:
    """Raise ValueError for the first input that is missing, a folder, or empty, before anything is written."""
    for path in paths:
        if path.is_dir():
            raise ValueError(f"--input {path} is a folder; name the files in it, such as {path}/day_*.gz")
        if not path.exists():
            raise ValueError(f"--input {path} does not exist; check its name")
        if path.stat().st_size == 0:
            raise ValueError(f"--input {path} is empty; leave it out or fetch it again")


def ingest(paths: tuple[Path, ...], target: Path, *, rejects: Rejects, chunk_bytes: int) -> tuple[InputFile, ...]:
    """Write every well-formed line of the logs, in their order, to the Arrow IPC file `target`.

    All logs have the columns of the first (`data_pipeline.parse.detect_schema`).

    Args:
        paths: logs that passed `check_inputs`.
        target: the Arrow file to write.
        rejects: collects malformed lines, and limits them.
        chunk_bytes: text parsed at a time; a few chunks per core are in memory.

    Raises:
        ValueError: a log is damaged, no Criteo log, or has too many malformed lines; names file and line.
    """
    schema = _schema_of(paths[0], chunk_bytes)
    files = []
    with (
        pa.ipc.new_file(target, schema) as writer,
        ThreadPoolExecutor(WORKERS) as pool,
        tqdm(total=sum(path.stat().st_size for path in paths), desc="reading", unit="B", unit_scale=True, disable=None) as bar,
    ):
        for path in paths:
            rows, rejected_before = 0, rejects.count
            for chunk in _parse_ahead(pool, _read_chunks(path, chunk_bytes, bar), schema):
                for offset, reason in chunk.rejected:
                    rejects.add(path, rows + offset + 1, reason)
                rows += chunk.lines
                writer.write_batch(chunk.batch)
            rejected = rejects.count - rejected_before
            files.append(InputFile(name=path.name, bytes=path.stat().st_size, rows_in=rows, rows_rejected=rejected))
    return tuple(files)


def _schema_of(path: Path, chunk_bytes: int) -> pa.Schema:
    with tqdm(disable=True) as silent:
        text = next(_read_chunks(path, max(chunk_bytes, _LONGEST_LINE), silent))
    try:
        return detect_schema(text.replace(b"\r\n", b"\n"))
    except ValueError as error:
        raise ValueError(f"{path}:1: {error}") from error


def _parse_ahead(pool: ThreadPoolExecutor, chunks: Iterator[bytes], schema: pa.Schema) -> Iterator[ParsedChunk]:
    """Parsed chunks in order, with a bounded number of them under way."""
    under_way: deque[Future[ParsedChunk]] = deque()
    for text in chunks:
        under_way.append(pool.submit(parse_chunk, text, schema))
        if len(under_way) > 2 * WORKERS:
            yield under_way.popleft().result()
    while under_way:
        yield under_way.popleft().result()


def _read_chunks(path: Path, chunk_bytes: int, bar: tqdm) -> Iterator[bytes]:
    """Pieces of a log's text of about chunk_bytes, each of whole lines ended by a newline; bar counts bytes on disk."""
    position = 0
    try:
        with path.open("rb") as raw:
            compressed = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
            raw.seek(0)
            for chunk in _whole_lines(gzip.GzipFile(fileobj=raw) if compressed else raw, path, chunk_bytes):
                yield chunk
                bar.update(raw.tell() - position)
                position = raw.tell()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: damaged gzip ({error}); fetch or compress it again") from error
    except OSError as error:
        raise ValueError(f"cannot read --input {path}: {error.strerror or error}; check the file and its permissions") from error
    if not position:
        raise ValueError(f"--input {path} is empty; leave it out or fetch it again")


def _whole_lines(text: BinaryIO | gzip.GzipFile, path: Path, chunk_bytes: int) -> Iterator[bytes]:
    rest = b""
    while block := text.read(chunk_bytes):
        end = block.rfind(b"\n") + 1
        if end:
            yield rest + block[:end]
            rest = block[end:]
        else:
            rest += block
            if len(rest) > _LONGEST_LINE:
                raise ValueError(f"{path}: a line of more than {_LONGEST_LINE} bytes; this is no Criteo log")
    if rest:
        yield rest + b"\n"
