"""MODEL.pt2: a model compiled by AOTInductor, its metadata and a checksum, in one file.

The file is a ZIP archive. Its comment is the checksum of its directory, which has the CRC-32 of every file. Damaged code would end
the process that loads it, and damaged weights would give wrong scores, so all are compared before anything is loaded.

F categorical columns, I integer columns, B rows of a request, V values.
"""

from __future__ import annotations

import hashlib
import lzma
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO

import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from comera_rec.ops.native import LIBRARY
from data_pipeline.columns import LABEL
from data_pipeline.errors import UserError

FORMAT_VERSION = 2  # 1 had no checksum
METADATA_KEY = "comera_rec"
OPERATOR = "served_bags"  # the operator that the form "fast" calls

Offset = int | float | tuple[float, float] | None


@dataclass(frozen=True, kw_only=True)
class ModelMetadata:
    """Metadata of a package.

    Attributes:
        format_version: version of this record and of the inputs.
        dense: names of the integer columns, in the order of requests.
        offsets: number added to each integer column before its logarithm, or its mean and standard deviation; None where values
            stay as they are.
        categorical: rows of the table of each categorical column, in the order of requests.
        checksums: SHA-256 of each column's vocabulary, as in the data set's manifest; None where ids are hashes.
        library_version, torch_version: versions that wrote the package.
        form: "portable", with torch's operators alone, or "fast", with those of comera_rec beside it.
        dtype: type that tables are stored in: "float32", "bfloat16" or "int8".
        formed_rows: number of rows formed in advance.
        auc, ne: metrics of the package on the test split; trained_auc, trained_ne: those of the run. Means over labels.
        data: folder of the data set that the model was trained on.
        labels: names of what is predicted, in the order of scores.
    """

    format_version: int
    dense: tuple[str, ...]
    offsets: tuple[Offset, ...]
    categorical: dict[str, Annotated[int, Field(ge=1, lt=2**63)]]
    checksums: dict[str, str | None]
    library_version: str
    torch_version: str
    form: str
    dtype: str
    formed_rows: int
    auc: float | None
    ne: float | None
    trained_auc: float | None
    trained_ne: float | None
    data: str
    labels: tuple[str, ...] = (LABEL,)

    @property
    def score_shape(self) -> tuple[int, ...]:
        """Shape of a row's scores: (), or (L,) for several labels."""
        return () if len(self.labels) == 1 else (len(self.labels),)

    def to_json(self) -> str:
        """Return the JSON text that `from_json` reads."""
        return _METADATA.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> ModelMetadata:
        """Read what `to_json` wrote; raises ValidationError for anything else."""
        return _METADATA.validate_json(text)


_METADATA = TypeAdapter(ModelMetadata)
_PACKED = TypeAdapter(dict[str, object])
_REMEDY = "give a MODEL.pt2 that `comera export` wrote"
# Raised by zipfile, and by what it calls, for bad bytes.
_BAD = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, ValueError, OSError, EOFError, RuntimeError, OverflowError)


def require_package(path: Path) -> None:
    """Raise ValueError if a path that is to become a package holds something else."""
    if not path.exists():
        return
    try:
        with zipfile.ZipFile(path) as archive:
            is_package = any(name.endswith("_metadata.json") for name in archive.namelist())
    except _BAD:
        is_package = False
    if not is_package:
        raise UserError(f"{path} exists and is not a package of `comera export`: choose another name")


def seal(path: Path) -> None:
    """Write the checksum of a new package's directory into it."""
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = _checksum(archive)


def read_metadata(path: str | Path) -> ModelMetadata:
    """Read the metadata of a package, without running code from it.

    Raises:
        ValueError: if the file is missing, not a package of `comera export`, or of another format version.
    """
    with _open(Path(path)) as file:
        return _read(file, Path(path))


def _open(path: Path) -> BinaryIO:
    if path.is_dir():
        raise UserError(f"{path} is a folder: give a MODEL.pt2 that `comera export` wrote from it")
    try:
        return path.open("rb")
    except FileNotFoundError as error:
        raise UserError(f"{path} doesn't exist: {_REMEDY}") from error


def _read(file: BinaryIO, path: Path, *, check: bool = False) -> ModelMetadata:
    """Read the metadata of an open package, and optionally compare the whole package with its checksum."""
    try:
        with zipfile.ZipFile(file) as archive:
            names = [name for name in archive.namelist() if name.endswith("_metadata.json")]
            texts = [_PACKED.validate_json(archive.read(name)).get(METADATA_KEY) for name in names]
            metadata = next((text for text in texts if isinstance(text, str)), None)
            version = None if metadata is None else _PACKED.validate_json(metadata).get("format_version")
            if check and version == FORMAT_VERSION:
                _require_whole(archive)
    except _BAD as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{path} is not a package, or a damaged one ({reason}): {_REMEDY}") from error
    if metadata is None:
        raise UserError(f"{path} is a package of another program: {_REMEDY}")
    if version != FORMAT_VERSION:
        raise UserError(f"{path} has format version {version} and this library reads {FORMAT_VERSION}: export the run again")
    try:
        return ModelMetadata.from_json(metadata)
    except ValidationError as error:
        raise UserError(f"{path} has metadata that can't be read ({error.errors()[0]['loc'][0]}): export the run again") from error


def _checksum(archive: zipfile.ZipFile) -> bytes:
    """Return the SHA-256 of an archive's directory: names, sizes and CRC-32 of its files."""
    directory = [(member.filename, member.file_size, member.CRC) for member in archive.infolist()]
    return hashlib.sha256(repr(directory).encode()).hexdigest().encode()


def _require_whole(archive: zipfile.ZipFile) -> None:
    """Raise BadZipFile if a file of a package is damaged, or not one that `seal` saw."""
    if _checksum(archive) != archive.comment:
        raise zipfile.BadZipFile("its contents differ from its checksum")
    damaged = archive.testzip()
    if damaged is not None:
        raise zipfile.BadZipFile(f"{damaged} fails its checksum")


class ServingModel:
    """A loaded package, which several threads may call at once.

    Loading runs code from the file, so only open files from people you trust.

    Args:
        path: path of MODEL.pt2.
        threads: number of threads that torch may use in this process; None leaves it unchanged.

    Raises:
        ValueError: as `read_metadata`; if the file is damaged or can't be loaded, or this library lacks the operator that it calls.
    """

    def __init__(self, path: str | Path, *, threads: int | None = None) -> None:
        self.path = Path(path)
        with _open(self.path) as file:
            self.metadata = _read(file, self.path, check=True)
            version = self.metadata.library_version
            if self.metadata.form == "fast" and not hasattr(torch.ops.comera_rec, OPERATOR):
                raise UserError(f"{path} calls comera_rec::{OPERATOR}, which {LIBRARY} lacks: install comera-rec {version}")
            if threads is not None:
                torch.set_num_threads(threads)
            self._limits = torch.tensor(list(self.metadata.categorical.values()))
            features = len(self._limits)
            checked = f"/proc/self/fd/{file.fileno()}"  # another file may have taken the path
            try:
                # torch._inductor.aoti_load_package calls the same loader, but imports the compiler, which takes seconds and memory.
                self._loader = torch._C._aoti.AOTIModelPackageLoader(checked, "model", False, 1, -1)
                # The first call initializes the model and fails if operators have changed since it was compiled.
                ids = torch.zeros(max(2, features), dtype=torch.long)
                self._run(torch.zeros(1, len(self.metadata.dense)), ids, torch.ones(features, dtype=torch.long))
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                raise UserError(
                    f"{path} can't be loaded ({reason}): it was written by comera-rec {version} on torch "
                    f"{self.metadata.torch_version}, and this is torch {torch.__version__}; export the run again on this machine"
                ) from error

    def __call__(self, dense: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
        """Return the probabilities of label 1, [B] float32; [B, L] for a model of several labels.

        Args:
            dense: [B, I] float32, as the data set stores integer columns.
            values: [V] int64, ids column by column.
            lengths: [F * B] int32 or int64, number of values of each row, column by column.

        Raises:
            ValueError: naming what is wrong with the inputs.
        """
        self._require_shapes(dense, values, lengths)
        padded = values if len(values) >= 2 else torch.cat([values, values.new_zeros(2 - len(values))])
        bags = padded.contiguous(), lengths.long().contiguous()
        try:
            scores = self._run(dense.contiguous(), *bags)
        except RuntimeError:
            self._require_numbers(dense, values, lengths)
            raise
        invalid = scores.view(len(dense), len(self.metadata.labels)).isnan().any(1)
        if invalid.any():
            self._require_numbers(dense, values, lengths)
            scores = self._run(dense.where(~invalid[:, None], 0).contiguous(), *bags)
            if scores.isnan().any():
                raise UserError("scores are not numbers: the model has diverged; export another checkpoint")
            row = int(invalid.nonzero()[0])
            column = int(dense[row].abs().argmax())
            raise UserError(
                f"dense column {self.metadata.dense[column]} is {float(dense[row, column])} in row {row}, for which scores are not "
                "numbers: give a smaller one"
            )
        return scores

    def _run(self, *inputs: Tensor) -> Tensor:
        return self._loader.run(list(inputs))[0]

    def _require_shapes(self, dense: Tensor, values: Tensor, lengths: Tensor) -> None:
        """Raise ValueError unless shapes and types are those that compiled code relies on."""
        columns, features = len(self.metadata.dense), len(self.metadata.categorical)
        if dense.dim() != 2 or dense.shape[1] != columns or dense.dtype != torch.float32:
            raise UserError(f"dense is {_describe(dense)}: give float32 [B, {columns}]")
        if values.dim() != 1 or values.dtype != torch.int64:
            raise UserError(f"values is {_describe(values)}: give int64 [V]")
        batch = dense.shape[0]
        if lengths.shape != (features * batch,) or lengths.dtype not in (torch.int32, torch.int64):
            raise UserError(f"lengths is {_describe(lengths)}: give int64 [{features * batch}], {features} columns of {batch} rows")
        total = int(lengths.double().sum())  # a sum of integers could overflow
        if total != len(values):
            raise UserError(f"lengths add up to {total} for {len(values)} values: the two must be equal")

    def _require_numbers(self, dense: Tensor, values: Tensor, lengths: Tensor) -> None:
        """Raise ValueError for the lengths, number or id that made scores invalid, if there is one."""
        names = list(self.metadata.categorical)
        if bool((lengths < 0).any()):
            raise UserError(f"lengths hold {int(lengths.min())}: give numbers of values, at least 0")
        if not bool(dense.isfinite().all()):
            row, column = dense.isfinite().logical_not().nonzero()[0].tolist()
            raise UserError(
                f"dense column {self.metadata.dense[column]} is {float(dense[row, column])} in row {row}: give a number"
            )
        counts = lengths.view(len(names), -1).sum(1)
        limits = self._limits.repeat_interleave(counts)
        invalid = ((values < 0) | (values >= limits)).nonzero().flatten().tolist()
        if invalid:
            column = int(torch.searchsorted(counts.cumsum(0), invalid[0], right=True))
            raise UserError(
                f"id {int(values[invalid[0]])} is out of range in column {names[column]}: its ids run from 0 to "
                f"{int(self._limits[column]) - 1}"
            )


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
