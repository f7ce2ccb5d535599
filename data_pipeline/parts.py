"""Logs, plain or gzipped, cut into parts at line boundaries: the units of work, of resuming and of memory.

Part k of a log holds the lines whose first byte is in [k P, (k + 1) P) of its text, for parts of P bytes. So where a log is cut
depends on its text alone, gzipped or not. A plain part is read by itself; a gzipped log is decompressed from its beginning, once a
pass, and the parts that are done already are dropped on the way.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

LONGEST_LINE = 1 << 16
_GZIP_MAGIC = b"\x1f\x8b"
_BLOCK = 1 << 20
Skip = Callable[[int], bool]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A piece of a log: which, where its text begins in that of the log, and the text, whole lines ended by newlines.

    last: the log ends with it.
    """

    log: int
    number: int
    start: int
    text: bytes
    last: bool


@dataclass(frozen=True, kw_only=True)
class LogIdentity:
    """What tells that a log is still the one that was read: its name, bytes on disk and time of modification."""

    name: str
    bytes: int
    mtime_ns: int


def identify(paths: tuple[Path, ...]) -> tuple[LogIdentity, ...]:
    """Identities of the inputs.

    Raises:
        ValueError: one is missing, a folder, or empty; named before anything is written.
    """
    found = []
    for path in paths:
        if path.is_dir():
            raise ValueError(f"--input {path} is a folder; name the files in it, such as {path}/day_*.gz")
        if not path.exists():
            raise ValueError(f"--input {path} does not exist; check its name")
        status = path.stat()
        if status.st_size == 0:
            raise _empty(path)
        found.append(LogIdentity(name=path.name, bytes=status.st_size, mtime_ns=status.st_mtime_ns))
    return tuple(found)


def first_lines(path: Path) -> bytes:
    """The text of a log's first lines, with \\n alone for line ends."""
    text = next(read_parts(0, path, part_bytes=LONGEST_LINE, skip=lambda _: False)).text
    return text.replace(b"\r\n", b"\n")


def read_parts(log: int, path: Path, *, part_bytes: int, skip: Skip) -> Iterator[Part]:
    """The parts of a log in order, without those of which `skip(number)` says so.

    Raises:
        ValueError: the log can't be read, is damaged or holds no text, or has a line that is longer than any of a log.
    """
    try:
        with path.open("rb") as raw:
            compressed = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
        cut = _gzipped_parts if compressed else _plain_parts
        yield from cut(log, path, part_bytes, skip)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: damaged gzip ({error}); fetch or compress it again") from error
    except OSError as error:
        raise ValueError(f"cannot read --input {path}: {error.strerror or error}; check the file and its permissions") from error


def _plain_parts(log: int, path: Path, part_bytes: int, skip: Skip) -> Iterator[Part]:
    size = path.stat().st_size
    count = max(1, -(-size // part_bytes))
    with path.open("rb") as file:
        for number in range(count):
            if skip(number):
                continue
            # From the byte before the part, because a newline there makes the part's first byte the first of a line.
            start = _line_end(file, number * part_bytes - 1, path) if number else 0
            end = _line_end(file, min((number + 1) * part_bytes, size) - 1, path)
            file.seek(start)
            text = _ended(file.read(end - start))
            yield Part(log=log, number=number, start=start, text=text, last=number + 1 == count)


def _gzipped_parts(log: int, path: Path, part_bytes: int, skip: Skip) -> Iterator[Part]:
    with gzip.open(path) as stream:
        number, start, held, ended = 0, 0, bytearray(), False
        while not (ended and number and not held):
            wanted = (number + 1) * part_bytes - 1 - start  # the part ends with the first newline from here on
            end = held.find(b"\n", max(wanted, 0)) + 1
            if (not end or end == len(held)) and not ended:  # whether the log ends here decides whether this part is the last
                block = stream.read(_BLOCK)
                held += block
                ended = not block
                if len(held) - max(wanted, 0) > LONGEST_LINE + _BLOCK:
                    raise _too_long(path)
                continue
            if wanted < 0:  # all lines that begin in here end in an earlier part, or there are none
                end = 0
            elif not end:
                end = len(held)
            if not start and not held:
                raise _empty(path)
            with memoryview(held) as view:
                text = _ended(bytes(view[:end]))
            del held[:end]
            if not skip(number):
                yield Part(log=log, number=number, start=start, text=text, last=ended and not held)
            number, start = number + 1, start + end


def _line_end(file: BinaryIO, at: int, path: Path) -> int:
    """Where the line that holds byte `at` ends: behind its newline, or with the log."""
    file.seek(at)
    window = file.read(LONGEST_LINE)
    end = window.find(b"\n")
    if end < 0 and len(window) == LONGEST_LINE:
        raise _too_long(path)
    return at + (end + 1 if end >= 0 else len(window))


def _ended(text: bytes) -> bytes:
    return text + b"\n" if text and text[-1:] != b"\n" else text


def _too_long(path: Path) -> ValueError:
    return ValueError(f"{path}: a line of more than {LONGEST_LINE} bytes; this is no log of clicks")


def inputs_changed() -> ValueError:
    """For logs that are no longer what they were when the run began."""
    return ValueError("an --input changed while it was read; run the same command again, which starts over")


def _empty(path: Path) -> ValueError:
    return ValueError(f"--input {path} is empty; leave it out or fetch it again")
