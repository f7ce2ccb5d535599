"""Division of logs into parts at line boundaries: the units of work, of resuming and of memory.

Part k of a log holds the lines whose first byte is in [k P, (k + 1) P) of its text, for parts of P bytes. So the division depends
only on the text, compressed or not. Parts of an uncompressed log are read separately; a compressed log (gzip, bzip2, xz, zstd) is
decompressed from its beginning once per pass, and parts that are already done are dropped. A part of a Parquet log is several row
groups that together fill a part, or a range of rows of a larger group; this division depends only on the log's metadata.
"""

import csv
import gzip
import itertools
import json
import lzma
import mmap
import re
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedIOBase, RawIOBase
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.errors import UserError
from data_pipeline.schema import LABEL, LogSchema, criteo_schema, detect_criteo_schema
from data_pipeline.sources import Source, empty, identify_log, open_log, unreadable
from data_pipeline.tables import BOM, Layout, json_types, read_names

LONGEST_LINE = 1 << 20  # bytes without the newline; lists of a hundred thousand values fit
_DETECTED_BYTES, _MORE_BYTES = 1 << 16, 1 << 24
_MAGICS: dict[str, tuple[bytes, ...]] = {  # how compressed logs begin; three letters alone may be text
    "gzip": (b"\x1f\x8b",),
    "bzip2": tuple(b"BZh%d" % level + block for level in range(1, 10) for block in (b"1A", b"\x17r")),
    "xz": (b"\xfd7zXZ\0",),
    "zstd": (b"\x28\xb5\x2f\xfd", *(b"%c\x2a\x4d\x18" % byte for byte in range(0x50, 0x60))),  # such frames open files of pzstd
}
_OPEN: dict[str, Callable[[Any], Any]] = {
    "gzip": gzip.open,
    "bzip2": lambda file: pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "bz2"),
    "xz": lambda file: _XzText(file),
    "zstd": lambda file: pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd"),
}
_DAMAGED = re.compile("ZSTD|bz2|compressed stream")  # in Arrow's OSErrors, beside those of reading
_UNREADABLE = {b"PK\3\4": "a zip archive", b"\xff\xfe": "text in UTF-16", b"\xfe\xff": "text in UTF-16"}
_PARQUET_MAGIC = b"PAR1"
_MAGIC_BYTES = 6
_XZ_BLOCK = 1 << 18
_BATCH_ROWS = 1 << 16
_LEAST_CELL_BYTES = 8  # assumed of a decoded cell if its encoded form is smaller
Skip = Callable[[int], bool]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a log: its number, where it begins in the log, and its content.

    start: position of its text in the log's text, or number of its first row.
    content: whole lines ending with newlines, or rows of Parquet.
    last: the log ends with this part.
    """

    log: int
    number: int
    start: int
    content: bytes | pa.Table
    last: bool


def detect_schema(log: Source) -> LogSchema:
    """Detect the columns of a Criteo log.

    Raises:
        ValueError: the log has others.
    """
    names = parquet_names(log)
    if names is not None:
        schema = criteo_schema(labeled=LABEL in names)
        if missing := [column.name for column in schema.columns if column.name not in names]:
            raise UserError(f"{log} has no column {missing[0]}, as Criteo's logs have; describe other logs with `schema`")
        return schema
    first = _first_lines(log, _DETECTED_BYTES)
    try:
        return detect_criteo_schema(first.replace(b"\r\n", b"\n"))
    except ValueError as error:
        raise UserError(f"{log}:1: {error}") from error


def count_parts(log: Source, part_bytes: int) -> int | None:
    """Count a log's parts; None if that requires reading it to its end."""
    magic = _magic(log)
    if (metadata := _parquet_metadata(log, magic)) is not None:
        return max(1, len(plan(metadata, part_bytes)))
    return None if _compression(magic) else _count_plain(identify_log(log).bytes, part_bytes)


def parquet_names(log: Source) -> tuple[str, ...] | None:
    """Return the column names of a Parquet log; None for other logs."""
    metadata = _parquet_metadata(log, _magic(log))
    return None if metadata is None else tuple(metadata.schema.to_arrow_schema().names)


def _first_lines(log: Source, size: int) -> bytes:
    part = next(read_parts(0, log, part_bytes=size, skip=lambda _: False))
    assert isinstance(part.content, bytes), "only texts have lines"
    return part.content


def json_names(log: Source) -> set[str]:
    """Return the names in the first lines of a log in JSON; none if these are blank or no JSON."""
    names = set[str]()
    for line in _first_lines(log, _MORE_BYTES).removeprefix(BOM).splitlines():
        with suppress(ValueError, TypeError, RecursionError):  # reported when the line is parsed
            names |= dict(json.loads(line)).keys()
    return names


def layout_of(log: Source, schema: LogSchema) -> Layout | None:
    """Return a log's column names, in its order, or the types of JSON's columns; None if columns are identified by position.

    Raises:
        ValueError: the log can't be read, or its first line isn't CSV.
    """
    if (names := parquet_names(log)) is not None:
        return names
    if schema.format == "jsonl":
        return json_types(_first_lines(log, _DETECTED_BYTES), schema, lambda: _first_lines(log, _MORE_BYTES))
    if not schema.header:
        return None
    try:
        return read_names(_first_lines(log, 1), schema)
    except csv.Error as error:  # Python's message advises opening the file in another way
        reason = "has a carriage return within it" if "new-line" in str(error) else f"is not CSV ({error})"
        raise UserError(f"the line of column names of {log} {reason}; correct it, or set header = false") from None


def check_layout(log: Source, schema: LogSchema) -> Layout | None:
    """Do what `layout_of` does, and check that the log has every column of the schema exactly once.

    Raises:
        ValueError: a column is missing or appears more than once.
    """
    layout = layout_of(log, schema)
    if layout is None and len({column.source for column in schema.columns}) < len(schema.columns):
        raise UserError(
            f"two columns of the schema have one name in {log}, which names none; leave out `column`, or set header = true"
        )
    names = layout if isinstance(layout, tuple) else ()
    counts = Counter(names)
    for column in schema.columns if isinstance(layout, tuple) else ():
        if column.kind != "ignore" and counts[column.source] != 1:
            number = "more than one column" if counts[column.source] else "no column"
            shown = ", ".join(repr(name)[1:-1] for name in names)  # escaped: names may contain line breaks
            raise UserError(f"{log} has {number} {column.source!r}; its columns are {shown[:200]}; correct the schema or the log")
    return layout


def read_parts(log: int, source: Source, *, part_bytes: int, skip: Skip, columns: Collection[str] | None = None) -> Iterator[Part]:
    """Yield the parts of a log in order, except those for whose number `skip` is true; of Parquet only the given columns, or all.

    Raises:
        ValueError: the log can't be read, is damaged or empty, or has a line longer than `LONGEST_LINE`.
    """
    magic = _magic(source)
    with _errors_of_reading(source):
        if magic.startswith(_PARQUET_MAGIC):
            yield from _parquet_parts(log, source, part_bytes, skip, columns)
            return
        for part in _text_parts(log, source, _compression(magic), part_bytes, skip):
            start = 0
            while len(part.content) - start > LONGEST_LINE:  # of lines that begin and end in a window, none is too long
                start = part.content.rfind(b"\n", start, start + LONGEST_LINE + 1) + 1
                if not start:
                    raise _too_long(source)
            yield part


@contextmanager
def _errors_of_reading(source: Source) -> Iterator[None]:
    try:
        yield
    except pa.ArrowException as error:
        raise UserError(f"{source}: damaged Parquet ({str(error).splitlines()[0]}); fetch or write it again") from error
    except OSError as error:
        raise unreadable(source, error) from error


def _compression(magic: bytes) -> str | None:
    return next((name for name, magics in _MAGICS.items() if magic.startswith(magics)), None)


@contextmanager
def _decompressed(source: Source, name: str) -> Iterator[BufferedIOBase]:
    with open_log(source, streamed=True) as file:
        try:
            with _OPEN[name](file) as stream:
                yield stream
        except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
            if isinstance(error, OSError) and not (isinstance(error, gzip.BadGzipFile) or _DAMAGED.search(str(error))):
                raise
            raise UserError(f"{source}: damaged {name} ({error}); fetch or compress it again") from error


class _XzText(RawIOBase):
    """The text of an xz file's streams. `lzma.LZMAFile` ends where another stream is damaged, as if the file ended there."""

    def __init__(self, file: Any) -> None:
        super().__init__()
        self._file, self._stream = file, lzma.LZMADecompressor(lzma.FORMAT_XZ)

    def readinto(self, buffer: Any) -> int:
        text = b""
        while not text:
            block = self._file.read(_XZ_BLOCK) if self._stream.eof or self._stream.needs_input else b""
            if self._stream.eof:
                following = (self._stream.unused_data + block).lstrip(b"\0")  # streams may be padded
                if not block and not following:
                    return 0
                if not following:
                    continue
                self._stream, block = lzma.LZMADecompressor(lzma.FORMAT_XZ), following
            elif self._stream.needs_input and not block:
                raise EOFError("it ends within a stream")
            text = self._stream.decompress(block, len(buffer))
        buffer[: len(text)] = text
        return len(text)


def _magic(log: Source) -> bytes:
    identify_log(log)  # raises ValueError if it is missing
    try:
        with open_log(log) as file:
            magic = file.read(_MAGIC_BYTES)
    except OSError as error:
        raise unreadable(log, error) from error
    if what := next((what for first, what in _UNREADABLE.items() if magic.startswith(first)), None):
        raise UserError(f"`input` {log} is {what}; give text in UTF-8, plain or compressed by {', '.join(_MAGICS)}, or Parquet")
    return magic


def _count_plain(size: int, part_bytes: int) -> int:
    return max(1, -(-size // part_bytes))


def _text_parts(log: int, source: Source, compression: str | None, part_bytes: int, skip: Skip) -> Iterator[Part]:
    """Yield parts of a text; a compressed one can't be read from anywhere but its beginning."""
    count = None if compression else _count_plain(identify_log(source).bytes, part_bytes)
    room = part_bytes + LONGEST_LINE + 1  # of a part, the byte before it and the rest of its last line
    # What has been read from `offset` on; memory is taken only where text comes, which spares small logs a part's worth of zeros.
    text, filled = mmap.mmap(-1, room + 1, flags=mmap.MAP_PRIVATE), 0

    def line_end(position: int) -> int:
        """Return the end of the line that contains the byte at `position` of the text: after its newline, or the end of the log."""
        newline = text.find(b"\n", position, filled) + 1
        if not newline and filled > room:
            raise _too_long(source)
        return newline or filled

    opened = _decompressed(source, compression) if compression else open_log(source, streamed=True)
    with opened as file, memoryview(text) as view:
        for number in itertools.count() if count is None else range(count):
            offset = max(0, number * part_bytes - 1)
            if count is not None:
                if skip(number):
                    filled = 0
                    continue
                file.seek(offset + filled)
            while filled <= room and (read := file.readinto(view[filled:])):
                filled += read
            if not filled and not number:
                raise empty(source)
            begin = line_end(0) if number else 0  # if the byte before is a newline, the part begins with a line
            end = line_end((number + 1) * part_bytes - 1 - offset)
            ends_log = filled <= room and end == filled
            is_last = ends_log if count is None else number + 1 == count
            content = _with_ends(bytes(view[begin:end]), ends_log=ends_log)
            rest = view[(number + 1) * part_bytes - 1 - offset : filled]
            filled = len(rest)
            view[:filled] = rest
            if count is not None or not skip(number):
                yield Part(log=log, number=number, start=offset + begin, content=content, last=is_last)
            if is_last:
                return


def _with_ends(text: bytes, *, ends_log: bool) -> bytes:
    """End the last line with a newline, and drop a blank line at the end of a log, as editors leave it."""
    if text and text[-1:] != b"\n":
        text += b"\n"
    if ends_log and (blank := re.search(rb"(?:^|\n)(\r?\n)\Z", text[-3:])):
        text = text[: -len(blank[1])]
    return text


def _too_long(source: Source) -> UserError:
    return UserError(f"{source}: a line is longer than {LONGEST_LINE} bytes; check that this is a click log")


def inputs_changed() -> UserError:
    """Return the error for logs that changed during the run."""
    return UserError("an `input` changed while it was read; run the same command again to start over")


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Rows of a part: `rows` rows of the groups after the first `skipped`; `start` is the number of the first in the log."""

    groups: range
    skipped: int
    rows: int
    start: int


def plan(metadata: pq.FileMetaData, part_bytes: int) -> list[Slice]:
    """Divide a log into parts."""
    slices: list[Slice] = []
    filled, start = 0, 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        rows, size = group.num_rows, _size(group)
        if not rows:
            continue
        if slices and filled + size <= part_bytes:
            last = slices[-1]
            slices[-1] = Slice(groups=range(last.groups.start, number + 1), skipped=0, rows=last.rows + rows, start=last.start)
            filled += size
        else:  # a group of more than a part is cut
            step = -(-rows // max(1, -(-size // part_bytes)))
            slices += [
                Slice(groups=range(number, number + 1), skipped=first, rows=min(step, rows - first), start=start + first)
                for first in range(0, rows, step)
            ]
            filled = size
        start += rows
    return slices


def _size(group: pq.RowGroupMetaData) -> int:
    cells = sum(group.column(column).num_values for column in range(group.num_columns))  # a list has one for each element
    return max(group.total_byte_size, cells * _LEAST_CELL_BYTES)


def _repeated_texts(metadata: pq.FileMetaData) -> list[str]:
    """List columns of texts with few bytes a cell: repeated ones, which take far more memory than a dictionary of them."""
    sizes = Counter[str]()
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for column in map(group.column, range(group.num_columns)):
            if column.physical_type == "BYTE_ARRAY" and "." not in column.path_in_schema:
                sizes[column.path_in_schema] += column.total_uncompressed_size - _LEAST_CELL_BYTES * column.num_values
    return [name for name, size in sizes.items() if size < 0]


def _parquet_metadata(log: Source, magic: bytes) -> pq.FileMetaData | None:
    """Read a log's Parquet metadata; None for other logs."""
    if not magic.startswith(_PARQUET_MAGIC):
        return None
    with _errors_of_reading(log), open_log(log) as file:
        return pq.read_metadata(pa.PythonFile(file, mode="r"))


def _parquet_parts(log: int, source: Source, part_bytes: int, skip: Skip, columns: Collection[str] | None) -> Iterator[Part]:
    with open_log(source) as opened:
        metadata = pq.read_metadata(pa.PythonFile(opened, mode="r"))
        repeated, unit = _repeated_texts(metadata), "us"  # the default, nanoseconds, end in 2262
        as_file = pa.PythonFile(opened, mode="r")
        file = pq.ParquetFile(as_file, metadata=metadata, read_dictionary=repeated, coerce_int96_timestamp_unit=unit)
        slices = plan(metadata, part_bytes)
        names = None if columns is None else [name for name in file.schema_arrow.names if name in columns]
        for groups, numbered in itertools.groupby(enumerate(slices), key=lambda item: item[1].groups):
            unskipped = [(number, part) for number, part in numbered if not skip(number)]
            if not unskipped:
                continue
            most = min(_BATCH_ROWS, unskipped[0][1].rows)
            # One group at a time: Arrow can't read lists of dictionaries across groups.
            of_groups = (file.iter_batches(most, row_groups=[group], columns=names, use_threads=False) for group in groups)
            batches = itertools.chain.from_iterable(of_groups)
            decoded, position = pa.table({}), 0  # the groups' rows from `position` on
            for number, part in unskipped:
                while position + len(decoded) < part.skipped + part.rows:
                    if position + len(decoded) <= part.skipped:
                        decoded, position = pa.table({}), position + len(decoded)
                    batch = next(batches, None)
                    if batch is None:
                        raise pa.ArrowInvalid("its metadata states more rows than it holds")
                    new_rows = pa.Table.from_batches([batch])
                    decoded = pa.concat_tables([decoded, new_rows]) if len(decoded) else new_rows
                content = decoded.slice(part.skipped - position, part.rows)
                yield Part(log=log, number=number, start=part.start, content=content, last=number + 1 == len(slices))
                decoded, position = decoded.slice(part.skipped + part.rows - position), part.skipped + part.rows
