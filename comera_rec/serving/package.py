"""MODEL.pt2: a model compiled by AOTInductor, its metadata and a checksum, in one file.

The file is a ZIP archive. Its comment is the checksum of its directory, which has the CRC-32 of every file. Damaged code would end
the process that loads it, and damaged weights would give wrong scores, so all are compared before anything is loaded.

MODEL.weights is an archive of the same kind: other weights for the code of one package, whose checksum its metadata names.

B rows of a request, K keys of a KeyedJaggedTensor, V ids.
"""

import hashlib
import io
import json
import logging
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from comera_rec.ops.native import LIBRARY
from data_pipeline.errors import UserError
from data_pipeline.schema import LABEL

log = logging.getLogger("comera_rec.serving")
FORMAT_VERSION = 3  # 1 had no checksum; 2 only models of `comera train`
METADATA, WEIGHTS = "extra/comera_rec.json", "data/weights.pt"  # in the archive's folder
OPERATOR = "served_bags"  # the operator that the form "fast" calls
DATATYPES = {  # names of the Open Inference Protocol -> torch's
    "FP32": "float32", "FP64": "float64", "FP16": "float16", "INT64": "int64", "INT32": "int32", "INT16": "int16",
    "INT8": "int8", "UINT8": "uint8", "BOOL": "bool",
}  # fmt: skip

Offset = int | float | tuple[float, float] | None


@dataclass(frozen=True, kw_only=True)
class TensorInput:
    """A tensor that a package takes or returns.

    -1 in its shape stands for the number of rows or, in that of an output, for any size that depends on the batch.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]

    @property
    def tensors(self) -> tuple["TensorInput", ...]:
        return (self,)


@dataclass(frozen=True, kw_only=True)
class FeatureInput:
    """A KeyedJaggedTensor that a package takes as tensors values [V] and lengths [K * B] int64, and weights [V] float32.

    Attributes:
        prefix: of the names of its tensors.
        keys: number of ids of each key; None where it isn't known, or where any id is accepted.
        is_weighted: whether it has weights.
    """

    prefix: str
    keys: dict[str, int | None]
    is_weighted: bool = False

    @cached_property
    def tensors(self) -> tuple[TensorInput, ...]:
        """The tensors that it consists of, of any size."""
        parts = {"values": "INT64", "lengths": "INT64"} | ({"weights": "FP32"} if self.is_weighted else {})
        return tuple(TensorInput(name=self.prefix + part, datatype=datatype, shape=(-1,)) for part, datatype in parts.items())

    @cached_property
    def largest(self) -> np.ndarray:
        """The largest id of each key, [K] uint64; -1 as such where any id is accepted."""
        return np.array([-1 if limit is None else limit - 1 for limit in self.keys.values()]).view(np.uint64)


@dataclass(frozen=True, kw_only=True)
class RunMetadata:
    """What a package of `comera export` says of its run.

    Attributes:
        dense: names of the integer columns, in the order of requests.
        offsets: number added to each integer column before its logarithm, or its mean and standard deviation; None where values
            stay as they are.
        checksums: SHA-256 of each categorical column's vocabulary, as in the data set's manifest; None where ids are hashes.
        auc, ne: metrics of the package on the test split; trained_auc, trained_ne: those of the run. Means over labels.
        data: folder of the data set that the model was trained on.
        labels: names of what is predicted, in the order of scores.
    """

    dense: tuple[str, ...]
    offsets: tuple[Offset, ...]
    checksums: dict[str, str | None]
    auc: float | None
    ne: float | None
    trained_auc: float | None
    trained_ne: float | None
    data: str
    labels: tuple[str, ...] = (LABEL,)


@dataclass(frozen=True, kw_only=True)
class ModelMetadata:
    """Metadata of a package.

    Attributes:
        format_version: version of this record.
        inputs: in the order of the package's tensors.
        outputs: in the order of the package's tensors.
        library_version, torch_version: versions that wrote the package.
        form: "portable", with torch's operators alone, or "fast", with those of comera_rec beside it.
        dtype: type that tables are stored in: "float32", "bfloat16" or "int8".
        code: SHA-256 of the captured program, with names, types and shapes of its weights.
        is_by_row: whether every input and output has a row for each row of the batch, whose outputs don't depend on other rows.
        package: in MODEL.weights, the checksum of the package that it is for.
        run: what `comera export` adds.
    """

    format_version: int
    inputs: tuple[TensorInput | FeatureInput, ...]
    outputs: tuple[TensorInput, ...]
    library_version: str
    torch_version: str
    form: str
    dtype: str
    code: str = ""
    is_by_row: bool = False
    package: str = ""
    run: RunMetadata | None = None

    @cached_property
    def tensors(self) -> tuple[TensorInput, ...]:
        """The tensors that the package takes; -1 in the shape of one that isn't by row stands for any size."""
        return tuple(tensor for each in self.inputs for tensor in each.tensors)

    def by_input(self, tensors: Iterable[Any]) -> Iterator[tuple[TensorInput | FeatureInput, list[Any]]]:
        """Yield each input with those of the package's tensors that are its own."""
        left = iter(tensors)
        for each in self.inputs:
            yield each, list(islice(left, len(each.tensors)))

    @property
    def names(self) -> list[str]:
        """Names of the tensors that the package takes, in order."""
        return [tensor.name for tensor in self.tensors]


_REMEDY = "give a MODEL.pt2 that `comera export` wrote"


def require_package(path: Path) -> None:
    """Raise ValueError if a path that is to become a package holds something else."""
    if not path.exists():
        return
    try:
        with zipfile.ZipFile(path) as archive:
            is_package = any(name.endswith(("_metadata.json", METADATA)) for name in archive.namelist())
    except Exception:  # of zipfile, and of what it calls, for bad bytes
        is_package = False
    if not is_package:
        raise UserError(f"{path} exists and is not a package of `comera export`: choose another name")


def seal(path: Path, metadata: ModelMetadata) -> None:
    """Write metadata into a compiled model, and the checksum of its directory."""
    with zipfile.ZipFile(path, "a") as archive:
        folder = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{folder}/{METADATA}", json.dumps(asdict(metadata)))
        archive.comment = _checksum(archive)


def write_weights(path: Path, metadata: ModelMetadata, weights: Mapping[str, Tensor], package: "ServingModel") -> ModelMetadata:
    """Write MODEL.weights without its metadata, which is returned, and load the weights into the package.

    Raises:
        ValueError: if the code of the package is for another model.
    """
    ours, theirs = (asdict(replace(each, run=None, is_by_row=False)) for each in (metadata, package.metadata))
    if differing := [name for name, value in ours.items() if value != theirs[name]]:
        raise UserError(
            f"the model doesn't fit {package.path} (they differ in {', '.join(differing)}): its layers, ranks or sizes, or the "
            f"versions of libraries, have changed, so export it to {package.path.name}"
        )
    chosen = {name: weights[name].detach().clone() for name in package.loader.get_constant_fqns() if name in weights}
    with zipfile.ZipFile(path, "w") as archive, archive.open(f"{path.stem}/{WEIGHTS}", "w", force_zip64=True) as file:
        torch.save(chosen, file)
    package.take(chosen, metadata)
    return replace(metadata, package=package.checksum)


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
            text = next((archive.read(name) for name in archive.namelist() if name.endswith(METADATA)), None)
            record = json.loads(text or "{}", object_hook=_with_tuples)
            version = record.get("format_version")
            if check and version == FORMAT_VERSION:
                _require_whole(archive)
    except Exception as error:  # of zipfile, and of what it calls, for bad bytes
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{path} is not a package, or a damaged one ({reason}): {_REMEDY}") from error
    if text is None:
        raise UserError(f"{path} is a package of another program: {_REMEDY}")
    if version != FORMAT_VERSION:
        raise UserError(f"{path} has format version {version} and this library reads {FORMAT_VERSION}: export the model again")
    try:
        inputs = tuple((FeatureInput if "prefix" in each else TensorInput)(**each) for each in record.pop("inputs"))
        outputs = tuple(TensorInput(**each) for each in record.pop("outputs"))
        run = record.pop("run")
        return ModelMetadata(**record, inputs=inputs, outputs=outputs, run=run and RunMetadata(**run))
    except (TypeError, KeyError) as error:
        raise UserError(f"{path} has metadata that can't be read ({error}): export the model again") from error


def load_code(file: str, path: Path) -> Any:
    """Load a package's code, which torch unpacks into the temporary folder.

    Raises:
        ValueError: the temporary folder lacks or has no room for it, or nothing in it may be executed.
        RuntimeError: the code can't be loaded here.
    """
    try:
        # torch._inductor.aoti_load_package calls the same loader, but imports the compiler, which takes seconds and memory.
        return torch._C._aoti.AOTIModelPackageLoader(file, "model", False, 1, -1)
    except RuntimeError as error:
        if not re.search("extract|temporary directory|map segment", reason := str(error).splitlines()[0]):
            raise
        raise UserError(
            f"{path} can't be unpacked ({reason}): set TMPDIR to a folder that has room and whose files may be executed"
        ) from error


def _with_tuples(record: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON object with its arrays as tuples."""

    def converted(value: Any) -> Any:
        return tuple(map(converted, value)) if isinstance(value, list) else value

    return {name: converted(value) for name, value in record.items()}


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
        ValueError: as `read_metadata`; if the file is damaged or can't be loaded, the temporary folder has no room to unpack it, or
            this library lacks the operator that it calls.
    """

    def __init__(self, path: str | Path, *, threads: int | None = None) -> None:
        self.path = Path(path)
        with _open(self.path) as file:
            self.metadata = _read(file, self.path, check=True)
            if self.metadata.package:
                raise UserError(f"{path} has weights alone: give the MODEL.pt2 that they are for")
            with zipfile.ZipFile(file) as archive:
                self.checksum = archive.comment.decode()
            version = self.metadata.library_version
            if self.metadata.form == "fast" and not hasattr(torch.ops.comera_rec, OPERATOR):
                raise UserError(f"{path} calls comera_rec::{OPERATOR}, which {LIBRARY} lacks: install comera-rec {version}")
            if threads is not None:
                torch.set_num_threads(threads)
            checked = f"/proc/self/fd/{file.fileno()}"  # another file may have taken the path
            try:
                self.loader = load_code(checked, self.path)
                self.loader.run(self._zeros())  # initializes the model; fails if operators have changed since it was compiled
            except RuntimeError as error:
                raise UserError(
                    f"{path} can't be loaded ({str(error).splitlines()[0]}): it was written by comera-rec {version} on torch "
                    f"{self.metadata.torch_version}, and this is torch {torch.__version__}; export the model again on this machine"
                ) from error

    def update_from_beside(self) -> bool:
        """Take the weights of MODEL.weights beside the package, and return whether there are some; log it if they don't fit."""
        path = self.path.with_suffix(".weights")
        if not path.exists():
            return False
        try:
            self.update(path)
        except ValueError as error:  # weights of the former package
            log.warning("%s", error)
            return False
        return True

    def update(self, path: str | Path) -> None:
        """Replace the weights by those of MODEL.weights, between two calls of any threads; errors as `read_weights`."""
        self.take(*self.read_weights(path))

    def read_weights(self, path: str | Path) -> tuple[dict[str, Tensor], ModelMetadata]:
        """Return what `take` takes, of MODEL.weights.

        Raises:
            ValueError: as `read_metadata`; if the file is damaged, or is for another package.
        """
        path = Path(path)
        with _open(path) as file:
            metadata = _read(file, path, check=True)
            if metadata.package != self.checksum:
                raise UserError(f"{path} is not for {self.path}: export the weights again beside it")
            with zipfile.ZipFile(file) as archive:
                content = next(archive.read(name) for name in archive.namelist() if name.endswith(WEIGHTS))
        return torch.load(io.BytesIO(content), weights_only=True), metadata

    def take(self, weights: dict[str, Tensor], metadata: ModelMetadata) -> None:
        """Replace all weights."""
        self.loader.load_constants(weights, False, True)  # copies them; calls hold Python's lock, so none is under way
        self.metadata = metadata

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs, for the tensors that `metadata.names` names; lengths may be int32.

        Raises:
            ValueError: naming what is wrong with the inputs.
        """
        self.check(*(tensor.detach().numpy() for tensor in tensors))
        return self.run(*tensors)

    def run(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs for tensors that `check` has passed; errors as when called."""
        given = [
            tensor if tensor.dtype != torch.int32 or wanted.datatype == "INT32" else tensor.long()
            for wanted, tensor in zip(self.metadata.tensors, tensors, strict=True)
        ]
        try:
            outputs = self.loader.run([tensor.contiguous() for tensor in given])
        except RuntimeError as error:
            self._require_numbers(tensors)
            if bad_id := re.search("id -?[0-9]+ is out of range for feature .*", str(error)):
                raise UserError(bad_id[0]) from error
            raise
        if any(output.is_floating_point() and bool(output.isnan().any()) for output in outputs):
            self._require_numbers(tensors)
            if self.metadata.run:
                raise UserError("scores are not numbers: a dense value is too large, or the model has diverged")
        return tuple(outputs)

    def check(self, *arrays: np.ndarray) -> int:
        """Return the number of rows of inputs, after checking the shapes and types that compiled code relies on.

        Raises:
            ValueError: naming what is wrong with the inputs.
        """
        if len(arrays) != len(self.metadata.tensors):
            raise UserError(f"{len(arrays)} tensors are given: give {', '.join(self.metadata.names)}")
        rows = set[int]()
        for each, given in self.metadata.by_input(arrays):
            if isinstance(each, FeatureInput):
                _require_lengths(each, *given)
                rows.add(given[1].size // len(each.keys))
            else:
                _require_shape(each, *given)
                if each.shape[:1] == (-1,):
                    rows.add(len(given[0]))
        if len(rows) > 1:
            raise UserError(f"inputs have {' and '.join(map(str, sorted(rows)))} rows: give the same number in each")
        return rows.pop() if rows else 0

    def _zeros(self) -> list[Tensor]:
        """Return inputs for one row."""
        zeros = []
        for each in self.metadata.inputs:
            if isinstance(each, TensorInput):
                zeros.append(torch.zeros([abs(size) for size in each.shape], dtype=getattr(torch, DATATYPES[each.datatype])))
            else:
                ids, lengths = torch.zeros(2, len(each.keys), dtype=torch.long)
                zeros += [ids, lengths + 1, torch.zeros(len(each.keys))][: len(each.tensors)]
        return zeros

    def _require_numbers(self, tensors: Sequence[Tensor]) -> None:
        """Raise ValueError for the number that made outputs invalid, if there is one."""
        for each, given in self.metadata.by_input(tensors):
            name, numbers = (f"{each.prefix}weights", given[-1]) if isinstance(each, FeatureInput) else (each.name, given[0])
            if not bool(numbers.isfinite().all()):
                where = numbers.isfinite().logical_not().nonzero()[0].tolist()
                raise UserError(f"{name} is {float(numbers[tuple(where)])} at {where}: give a number")


def _require_shape(wanted: TensorInput, array: np.ndarray) -> None:
    fits = array.ndim == len(wanted.shape) and all(n in (-1, size) for n, size in zip(wanted.shape, array.shape, strict=True))
    if not fits or array.dtype.name != DATATYPES[wanted.datatype]:
        shape = ", ".join("B" if size == -1 else str(size) for size in wanted.shape)
        raise UserError(f"{wanted.name} is {_describe(array)}: give {DATATYPES[wanted.datatype]} [{shape}]")


def _require_lengths(features: FeatureInput, values: np.ndarray, lengths: np.ndarray, weights: np.ndarray | None = None) -> None:
    prefix, keys = features.prefix, len(features.keys)
    if values.ndim != 1 or values.dtype != np.int64:
        raise UserError(f"{prefix}values is {_describe(values)}: give int64 [V]")
    if lengths.ndim != 1 or lengths.size % keys or lengths.dtype not in (np.int32, np.int64):
        raise UserError(f"{prefix}lengths is {_describe(lengths)}: give int64 [{keys} * B], key by key")
    if lengths.size and lengths.min() < 0:
        raise UserError(f"{prefix}lengths hold {lengths.min()}: give numbers of values, at least 0")
    total = int(lengths.sum(dtype=np.float64))  # a sum of integers could overflow
    if total != values.size:
        raise UserError(f"{prefix}lengths add up to {total} for {values.size} {prefix}values: the two must be equal")
    _require_ids(features, values, lengths)  # outputs may not show a bad one
    if weights is not None and (weights.shape != values.shape or weights.dtype != np.float32):
        raise UserError(f"{prefix}weights is {_describe(weights)}: give float32 [{values.size}]")


def _require_ids(features: FeatureInput, values: np.ndarray, lengths: np.ndarray) -> None:
    counts = lengths.reshape(len(features.keys), -1).sum(1)
    is_wrong = values.view(np.uint64) > features.largest.repeat(counts)
    if is_wrong.any():
        at = int(is_wrong.argmax())
        key = int(counts.cumsum().searchsorted(at, side="right"))
        name = list(features.keys)[key]
        raise UserError(f"id {values[at]} is out of range in column {name}: its ids run from 0 to {features.largest[key]}")


def _describe(array: np.ndarray) -> str:
    return f"{array.dtype.name} {list(array.shape)}"
