"""manifest.json: typed records that describe a preprocessed data set, and functions that read and check it.

    manifest = read_manifest("data/")
    check_shards(manifest, "data/")
    manifest.splits["train"].shards[0].path           # "train/part-00000.parquet", relative to the folder
    manifest.categorical_columns[2].num_embeddings    # rows of C3's embedding table

Keys in the file are the field names below, except that `rows.in` is `rows.read` here because `in` is a Python keyword.
"""

import hashlib
import platform
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Final, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field, TypeAdapter, ValidationError
from tqdm import tqdm

from data_pipeline.atomic import replacing
from data_pipeline.errors import UserError
from data_pipeline.schema import LABEL, LogSchema, Transform
from data_pipeline.sources import Source, join, read, size_of

FORMAT: Final = "comera-rec-dataset"
FORMAT_VERSION: Final = 1
MANIFEST_NAME = "manifest.json"
SPLITS = ("train", "val", "test")
Order = Literal["frequency", "similarity"]
FILES = (MANIFEST_NAME, *(f"{split}/*.parquet" for split in SPLITS), "vocabulary/*")  # patterns of a data set's files


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A Parquet file of the data set: its path relative to the folder, and what it must contain."""

    path: str
    rows: int
    bytes: int = 0
    sha256: str = ""


@dataclass(frozen=True, kw_only=True)
class Split:
    """A split: rows of the input, in input order, divided into consecutive shards."""

    rows: int
    shards: tuple[Shard, ...]


@dataclass(frozen=True, kw_only=True)
class InputFile:
    """A raw log: its name without folders, its bytes on disk, its number of lines and how many were rejected."""

    name: str
    bytes: int
    rows_in: int
    rows_rejected: int


@dataclass(frozen=True, kw_only=True)
class RowCounts:
    """Lines read from the inputs (key `in`) = rows written + lines rejected."""

    read: Annotated[int, Field(alias="in")]
    written: int
    rejected: int


@dataclass(frozen=True, kw_only=True)
class RejectedLine:
    """A malformed line: file name, line number from 1, and what is wrong with it."""

    file: str
    line: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Target:
    """A label, or the rows' weights in the loss: its mean, overall and per split (None for an empty split), and its column."""

    mean: float
    split_means: dict[str, float | None]
    name: str = LABEL


@dataclass(frozen=True, kw_only=True)
class IntegerColumn:
    """A numeric column, stored as log(max(x, min) + offset) > 0 with offset = 2 - min, and exactly 0.0 where missing.

    min and max are those of the training split, None if it has no values; missing counts cells of the whole input. If transform is
    "standardize", (x - mean) / scale is stored instead, with the training split's mean and standard deviation; if it is "none", x
    itself.
    """

    name: str
    missing: int
    offset: int | float
    min: int | float | None
    max: int | float | None
    transform: Transform = "log"
    mean: float | None = None
    scale: float | None = None

    @property
    def scaling(self) -> float | tuple[float, float] | None:
        """What stored numbers depend on: the offset of logarithms, mean and deviation of standardized numbers, None otherwise."""
        if self.transform == "log":
            return self.offset
        return None if self.mean is None or self.scale is None else (self.mean, self.scale)


@dataclass(frozen=True, kw_only=True)
class CategoricalColumn:
    """A categorical column, stored as ids: 0 = missing, rare or unseen; 1, 2, ... by falling frequency in the training split.

    num_embeddings is the largest id + 1. distinct and missing count the whole input (a missing cell is no distinct value).
    rows_at_zero is, per split, how many ids are 0. vocabulary lists value and count of ids 1, 2, ... in order. If ids are hashes
    into buckets, 0 = missing, no values were counted, and distinct and vocabulary are None. is_list: rows hold lists of ids, empty
    where missing. Values are hex digits as numbers, or 64-bit hashes (`data_pipeline.reference.hash_text`) of text. table is the
    vocabulary as a hash table (`data_pipeline.hashing`) that encodes new rows. grown: num_embeddings of the data sets that this
    one's vocabulary extended, oldest first; lower ids belong to them, and a new sequence of falling counts starts at each.
    order: "similarity" if ids of the first vocabulary are in an order of similarity within bands (`data_pipeline.similarity`).
    vectors: of an order of similarity, an .npy file: float16 [rows, K + 1] for ids from 1 on; the last coordinate is the frequency.
    head: of an order of similarity, the share of all occurrences that the most frequent twentieth of the values has.
    """

    name: str
    num_embeddings: int
    distinct: int | None
    missing: int
    min_count: int
    rows_at_zero: dict[str, int]
    vocabulary: Shard | None
    is_list: bool = False
    table: Shard | None = None
    grown: tuple[int, ...] = ()
    order: Order = "frequency"
    vectors: Shard | None = None
    head: float | None = None


@dataclass(frozen=True, kw_only=True)
class Transformed:
    """The data set whose vocabularies encoded this one: its folder as given, and the SHA-256 of its manifest.json."""

    data: str
    manifest_sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything that training needs to know about a data set. label and weight are None if the logs lack them.

    other_labels: the labels after the first.
    log: the schema of the logs.
    transformed: None if the vocabularies were built from this data set's training rows. Otherwise the integer columns' min and max
        and the vocabularies with their counts are those of the data set it names, extended by new values where `grown` says so,
        and distinct values were not counted.
    """

    format: Literal["comera-rec-dataset"]
    format_version: Literal[1]
    versions: dict[str, str]
    options: dict[str, str | int | float | None]
    inputs: tuple[InputFile, ...]
    rows: RowCounts
    rejected_lines: tuple[RejectedLine, ...]
    label: Target | None
    integer_columns: tuple[IntegerColumn, ...]
    categorical_columns: tuple[CategoricalColumn, ...]
    splits: dict[str, Split]
    log: LogSchema
    transformed: Transformed | None = None
    other_labels: tuple[Target, ...] = ()
    weight: Target | None = None

    @property
    def labels(self) -> tuple[Target, ...]:
        """All labels, in the order of their columns."""
        return (*((self.label,) if self.label else ()), *self.other_labels)


_MANIFEST = TypeAdapter(Manifest)
REMEDY = "run `comera preprocess` again"


def write_manifest(manifest: Manifest, folder: str | Path) -> None:
    """Write manifest.json into the folder."""
    text = _MANIFEST.dump_json(manifest, by_alias=True, indent=2)
    with replacing(Path(folder) / MANIFEST_NAME) as temporary:
        temporary.write_bytes(text + b"\n")


def read_manifest(folder: str | Path) -> Manifest:
    """Read and validate the manifest.json in a data set's folder or at its URL.

    Raises:
        ValueError: the manifest is missing, not JSON, of an unknown format or version, or has a missing key or one of wrong type.
    """
    path = join(folder, MANIFEST_NAME)
    if size_of(path) is None:
        reason = "is not a preprocessed data set; make one with `comera preprocess`"
        if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/[^/]", str(folder)):
            reason = "is a URL, which only training and evaluation read; copy the data set to this machine"
        raise UserError(f"{path} does not exist: {folder} {reason}")
    try:
        manifest = _MANIFEST.validate_json(read(path))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UserError(f"{path}: {key}: {first['msg']}; {REMEDY}") from error
    for file in files_of(manifest):
        if Path(file.path).is_absolute() or ".." in Path(file.path).parts:
            raise UserError(f"{path}: {file.path} is outside of {folder}; {REMEDY}")
    missing = [name for name in SPLITS if name not in manifest.splits]
    if missing:
        raise UserError(f"{path}: splits.{missing[0]}: Field required; {REMEDY}")
    return manifest


def files_of(manifest: Manifest) -> Iterator[Shard]:
    """Iterate over the shards, vocabularies and tables of a data set."""
    yield from (shard for split in manifest.splits.values() for shard in split.shards)
    yield from (
        file for column in manifest.categorical_columns for file in (column.vocabulary, column.table, column.vectors) if file
    )


def check_shards(manifest: Manifest, folder: str | Path) -> None:
    """Check that every shard of every split exists and has the size that the manifest states, and each split's rows.

    Raises:
        ValueError: a shard is missing or differs; the message names the first.
    """
    for name, split in manifest.splits.items():
        total = sum(shard.rows for shard in split.shards)
        if total != split.rows:
            raise UserError(f"{folder}: split {name} states {split.rows} rows, but its shards {total}; {REMEDY}")
        for shard in split.shards:
            _check_size(shard, join(folder, shard.path))


def check_file(file: Shard, folder: Path, *, contents: bool = False) -> Path:
    """Check that a file exists with the size, and optionally the contents, that the manifest states; return its path.

    Raises:
        ValueError: it is missing or differs.
    """
    path = folder / file.path
    _check_size(file, path)
    if contents and file_sha256(path) != file.sha256:
        raise UserError(f"{path} differs from the SHA-256 in the manifest; {REMEDY}")
    return path


def _check_size(file: Shard, path: Source) -> None:
    size = size_of(path)
    if size is None:
        raise UserError(f"{path} does not exist, but the manifest lists it; {REMEDY}")
    if size != file.bytes:
        raise UserError(f"{path} has {size} bytes, but the manifest states {file.bytes}; {REMEDY}")


def verify(manifest: Manifest, folder: Path) -> None:
    """Read all files of a data set, and compare them with its manifest.

    Raises:
        ValueError: a file is missing or differs, or a split has other rows than its shards; the message names the first.
    """
    check_shards(manifest, folder)
    files = list(files_of(manifest))
    with ThreadPoolExecutor(4) as pool:
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


def describe_file(path: str, folder: Path, *, rows: int) -> Shard:
    """Describe a written file for the manifest."""
    file = folder / path
    return Shard(path=path, rows=rows, bytes=file.stat().st_size, sha256=file_sha256(file))


def versions() -> dict[str, str]:
    """Return the versions of Python and the packages that write a data set."""
    packages = ("comera-rec", "numpy", "pyarrow")
    return {"python": platform.python_version()} | {package: metadata.version(package) for package in packages}


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
