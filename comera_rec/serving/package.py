"""MODEL.pt2: a model compiled by AOTInductor, with what it says about itself, as one file.

F categorical columns, I integer columns, B rows of a request, V values.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor
from torch._inductor import aoti_load_package

from comera_rec.ops.native import LIBRARY

FORMAT_VERSION = 1
METADATA_KEY = "comera_rec"
OPERATOR = "served_bags"  # of the form "fast"

Offset = int | float | tuple[float, float] | None


@dataclass(frozen=True, kw_only=True)
class ModelMetadata:
    """What a package says about itself.

    Attributes:
        format_version: of this record and of the inputs.
        dense: names of the integer columns, in the order of a request's.
        offsets: what is added to each before its logarithm, or mean and standard deviation; None where values stay as they come.
        categorical: rows of each categorical column's table, in the order of a request's.
        checksums: SHA-256 of each column's vocabulary, as in the data set's manifest; None where ids are hashes.
        library_version, torch_version: what wrote it.
        form: "portable", of torch's operators alone, or "fast", with comera_rec's beside it.
        dtype: of tables as stored: "float32", "bfloat16" or "int8".
        formed_rows: rows that are formed in advance.
        auc, ne: on the test split, as exported; trained_auc, trained_ne: of the run.
        data: folder of the data set that it was trained on.
    """

    format_version: int
    dense: tuple[str, ...]
    offsets: tuple[Offset, ...]
    categorical: dict[str, int]
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

    def to_json(self) -> str:
        """As `from_json` reads it."""
        return _METADATA.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> ModelMetadata:
        """The inverse of `to_json`; ValidationError if it is something else."""
        return _METADATA.validate_json(text)


_METADATA = TypeAdapter(ModelMetadata)
_PACKED = TypeAdapter(dict[str, object])


def read_metadata(path: str | Path) -> ModelMetadata:
    """What a package says about itself, without running any of it.

    Raises:
        ValueError: if the file is not there, no package, not one of ours, or of another format version.
    """
    path = Path(path)
    remedy = "give a MODEL.pt2 that `comera export` wrote"
    if not path.is_file():
        raise ValueError(f"{path} is not there: {remedy}")
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith("_metadata.json")]
            texts = [_PACKED.validate_json(archive.read(name)).get(METADATA_KEY) for name in names]
    except (zipfile.BadZipFile, ValidationError, OSError) as error:
        raise ValueError(f"{path} is no package ({str(error).splitlines()[0]}): {remedy}") from error
    found = next((text for text in texts if isinstance(text, str)), None)
    if found is None:
        raise ValueError(f"{path} is a package of another program: {remedy}")
    version = _PACKED.validate_json(found).get("format_version")
    if version != FORMAT_VERSION:
        raise ValueError(f"{path} has format version {version} and this library reads {FORMAT_VERSION}: export the run again")
    try:
        return ModelMetadata.from_json(found)
    except ValidationError as error:
        raise ValueError(f"{path} has metadata that can't be read ({error.errors()[0]['loc'][0]}): export the run again") from error


class ServingModel:
    """A package, loaded. Calls may come from several threads at once.

    Loading runs code from the file: open files of people you trust.

    Args:
        path: of MODEL.pt2.
        threads: that torch may use in this process; None leaves it as it is.

    Raises:
        ValueError: as `read_metadata`; if the file can't be loaded, or this library lacks the operator that it calls.
    """

    def __init__(self, path: str | Path, *, threads: int | None = None) -> None:
        self.path = Path(path)
        self.metadata = read_metadata(path)
        if self.metadata.form == "fast" and not hasattr(torch.ops.comera_rec, OPERATOR):
            raise ValueError(
                f"{path} calls comera_rec::{OPERATOR}, which {LIBRARY} lacks: install comera-rec {self.metadata.library_version}"
            )
        if threads is not None:
            torch.set_num_threads(threads)
        self._limits = torch.tensor(list(self.metadata.categorical.values()))
        features = len(self.metadata.categorical)
        try:
            self._run = aoti_load_package(str(path))
            # The first call makes things ready, and shows whether the operators are those that it was compiled for.
            self._run(torch.zeros(1, len(self.metadata.dense)), torch.zeros(max(2, features)).long(), torch.ones(features).long())
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"{path} can't be loaded ({reason}): it was written by comera-rec {self.metadata.library_version} on torch "
                f"{self.metadata.torch_version}, here is {torch.__version__}; export the run again on this machine"
            ) from error

    @classmethod
    def load(cls, path: str | Path, *, threads: int | None = None) -> ServingModel:
        """The model of a package; arguments and errors as for the class."""
        return cls(path, threads=threads)

    def __call__(self, dense: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
        """Probabilities of a click, [B] float32.

        Args:
            dense: [B, I] float32, as the data set stores integer columns.
            values: [V] int64, ids column by column.
            lengths: [F * B] int32 or int64, how many of the values each row has in each column: column by column.

        Raises:
            ValueError: naming what is wrong with the inputs.
        """
        self._require_shapes(dense, values, lengths)
        if not len(dense):
            return dense.new_empty(0)
        given = values if len(values) >= 2 else torch.cat([values, values.new_zeros(2 - len(values))])
        try:
            scores: Tensor = self._run(dense.contiguous(), given.contiguous(), lengths.long().contiguous())
        except RuntimeError:
            self._require_numbers(dense, values, lengths)
            raise
        if scores.isnan().any():
            self._require_numbers(dense, values, lengths)
            raise ValueError("scores are not numbers: the model has diverged; export another checkpoint")
        return scores

    def _require_shapes(self, dense: Tensor, values: Tensor, lengths: Tensor) -> None:
        """What compiled code takes for granted."""
        columns, features = len(self.metadata.dense), len(self.metadata.categorical)
        if dense.dim() != 2 or dense.shape[1] != columns or dense.dtype != torch.float32:
            raise ValueError(f"dense is {_told(dense)}: give float32 [B, {columns}]")
        if values.dim() != 1 or values.dtype != torch.int64:
            raise ValueError(f"values is {_told(values)}: give int64 [V]")
        batch = dense.shape[0]
        if lengths.shape != (features * batch,) or lengths.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"lengths is {_told(lengths)}: give int64 [{features * batch}], {features} columns of {batch} rows")
        total = int(lengths.sum())
        if total != len(values):
            raise ValueError(f"lengths add up to {total} for {len(values)} values: give as many")

    def _require_numbers(self, dense: Tensor, values: Tensor, lengths: Tensor) -> None:
        """Name what made scores that are no numbers, if a request did."""
        names = list(self.metadata.categorical)
        if bool((lengths < 0).any()):
            raise ValueError(f"lengths hold {int(lengths.min())}: give numbers of values, from 0 on")
        if not bool(dense.isfinite().all()):
            row, column = dense.isfinite().logical_not().nonzero()[0].tolist()
            raise ValueError(
                f"dense column {self.metadata.dense[column]} is {float(dense[row, column])} in row {row}: give a number"
            )
        counts = lengths.view(len(names), -1).sum(1)
        limits = self._limits.repeat_interleave(counts)
        wrong = ((values < 0) | (values >= limits)).nonzero().flatten().tolist()
        if wrong:
            column = int(torch.searchsorted(counts.cumsum(0), wrong[0], right=True))
            raise ValueError(
                f"id {int(values[wrong[0]])} is out of range in column {names[column]}: its ids run from 0 to "
                f"{int(self._limits[column]) - 1}"
            )


def _told(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
