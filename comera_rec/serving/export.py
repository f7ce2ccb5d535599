"""Export of a trained run as a package: tables in serving form, evaluated on the test split, compiled."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from torch._inductor import aoti_compile_and_package
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.utils import fresh_cache
from torch.export import Dim
from torchrec import KeyedJaggedTensor
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM

from comera_rec.data import ParquetBatches
from comera_rec.ops.native import LIBRARY
from comera_rec.ops.served_bags import DTYPES, row_bytes
from comera_rec.recsys import WideDeep
from comera_rec.serving.fast import FastTables
from comera_rec.serving.flat import FlatModel
from comera_rec.serving.package import FORMAT_VERSION, METADATA_KEY, ModelMetadata, require_package, seal
from comera_rec.serving.portable import PortableTables
from comera_rec.serving.tables import expand, served_tables
from comera_rec.serving.vocabularies import offsets_of
from comera_rec.training.evaluation import evaluate
from comera_rec.training.metrics import OneClass
from comera_rec.training.model import Schema
from comera_rec.training.runs import load_run
from data_pipeline.errors import UserError
from data_pipeline.manifest import CategoricalColumn, Manifest, read_manifest

FORMS = {"portable": PortableTables, "fast": FastTables}
PACKAGE = "model.pt2"


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of an export.

    Attributes:
        run: folder of a run.
        data: folder of the data set that the run was trained on; None takes the one in the run's config.
        form: "portable", with torch's operators alone, or "fast", with this library's.
        dtype: type that tables are stored in: "float32", "bfloat16" or "int8".
        expand: bytes for rows of the most frequent ids, which are formed in advance.
        last: use the last checkpoint even if the run keeps its best one.

    Raises:
        ValueError: for an unknown form or type, or negative bytes.
    """

    run: Path
    data: Path | None = None
    form: str = "portable"
    dtype: str = "float32"
    expand: int = 0
    last: bool = False

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise UserError(f"form is {self.form!r}: choose {' or '.join(map(repr, FORMS))}")
        if self.dtype not in DTYPES:
            raise UserError(f"dtype is {self.dtype!r}: choose one of {', '.join(map(repr, DTYPES))}")
        if self.expand < 0:
            raise UserError(f"expand is {self.expand}: give bytes, or 0 for none")


def export_run(options: ExportOptions, output: Path) -> ModelMetadata:
    """Write a run as a package to `output`; for the form "fast", also copy the library of operators to its folder.

    Returns:
        The metadata of the package.

    Raises:
        ValueError: for a folder without a checkpoint, a model without tables or of Wide & Deep, a data set that is missing or
            isn't the run's, or an output that is no package.
    """
    if output.is_dir():
        raise UserError(f"{output} is a folder: name a file, such as {output / PACKAGE}")
    require_package(output)
    with work_folder(output) as work:
        metadata = build_package(options, work)
        for library in work.glob(LIBRARY.name):
            library.replace(output.with_name(library.name))
        (work / PACKAGE).replace(output)
    return metadata


@contextmanager
def work_folder(output: Path) -> Iterator[Path]:
    """Make a temporary folder beside an output."""
    parent = output.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=parent) as work:
        yield Path(work)


def build_package(options: ExportOptions, folder: Path) -> ModelMetadata:
    """Write model.pt2 into a folder and, for the form "fast", the library of operators; errors as `export_run`."""
    flat, metadata = flatten_run(options)
    compile_package(flat, folder / PACKAGE, metadata)
    if options.form == "fast":
        shutil.copyfile(LIBRARY, folder / LIBRARY.name)
    return metadata


def flatten_run(options: ExportOptions) -> tuple[FlatModel, ModelMetadata]:
    """Return a run's model in the form to compile, and its metadata; errors as `export_run`."""
    model, config, schema = load_run(options.run, last=options.last)
    data = options.data or Path(config.data.path)
    manifest = read_manifest(data)
    if schema.differences(Schema.from_manifest(manifest)):
        raise UserError(
            f"{options.run} was trained with other columns or vocabularies than {data} has: give the data set of the run"
        )
    if not isinstance(model, DLRM | SimpleDeepFMNN | WideDeep):
        raise UserError(f"{options.run} holds a model without tables (tables.format is 'off'): export one with tables")
    tables = served_tables(model.sparse_arch.embedding_bag_collection)
    if options.expand:
        counts = [_counts(column, manifest, data) for column in manifest.categorical_columns]
        tables = expand(tables, counts, options.expand, row_bytes(tables[0].columns, DTYPES[options.dtype]))
    flat = FlatModel(model, FORMS[options.form](tables, DTYPES[options.dtype])).eval()
    split = next(name for name in ("test", "val", "train") if manifest.splits[name].rows)  # as the run was evaluated
    batches = ParquetBatches(data, split, batch_size=config.data.eval_batch_size)
    try:
        trained, served = (evaluate(each, batches, torch.device("cpu")) for each in (model, _Logits(flat, list(schema.sparse))))
    except OneClass:
        trained = served = {"auc": None, "ne": None}
    vocabularies = {column.name: column.vocabulary for column in manifest.categorical_columns}
    metadata = ModelMetadata(
        format_version=FORMAT_VERSION,
        dense=schema.dense,
        offsets=offsets_of(manifest),
        categorical=schema.sparse,
        checksums={name: None if file is None else file.sha256 for name, file in vocabularies.items()},
        library_version=version("comera-rec"),
        torch_version=torch.__version__,
        form=options.form,
        dtype=options.dtype,
        formed_rows=sum(len(table.formed) for table in tables if table.cores),
        labels=schema.labels,
        auc=served["auc"],
        ne=served["ne"],
        trained_auc=trained["auc"],
        trained_ne=trained["ne"],
        data=str(data.absolute()),
    )
    return flat, metadata


class _Logits(nn.Module):
    """A model of flat inputs with the signature that evaluation calls."""

    def __init__(self, flat: FlatModel, columns: list[str]) -> None:
        super().__init__()
        self.flat, self.columns = flat, columns

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        by_column = sparse.to_dict()
        values, lengths = ([getattr(by_column[name], part)() for name in self.columns] for part in ("values", "lengths"))
        return self.flat.logits(dense, torch.cat(values), torch.cat(lengths).long()).view(len(dense), -1)


def compile_package(flat: nn.Module, path: Path, metadata: ModelMetadata) -> None:
    """Compile a model of flat inputs by AOTInductor, for any number of rows and values."""
    batch, values, example = Dim("batch"), Dim("values"), 3
    features = len(metadata.categorical)
    count = features * example
    inputs = torch.zeros(example, len(metadata.dense)), torch.zeros(count, dtype=torch.long), torch.ones(count, dtype=torch.long)
    shapes = {"dense": {0: batch}, "values": {0: values}, "lengths": {0: features * batch}}
    settings: dict[str, Any] = {
        "aot_inductor.metadata": {
            METADATA_KEY: metadata.to_json(),
            "integer_columns": str(len(metadata.dense)),  # for C++
            "table_rows": " ".join(map(str, metadata.categorical.values())),
        }
    }
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(flat, inputs, dynamic_shapes=shapes, strict=True)
        pick_vec_isa()  # compiles programs to detect CPU features: in the common cache, or every export would repeat it
        with fresh_cache():  # a shared cache can mix weights and metadata of packages compiled at once
            aoti_compile_and_package(program, package_path=str(path), inductor_configs=settings)
    seal(path)


def _counts(column: CategoricalColumn, manifest: Manifest, data: Path) -> Tensor:
    """Return how often ids 0, 1, ... of a column occur in the training split."""
    if column.vocabulary is None:
        return torch.empty(0, dtype=torch.long)
    counts = torch.from_numpy(pq.read_table(data / column.vocabulary.path, columns=["count"])["count"].to_numpy().copy())
    zero = max(column.rows_at_zero["train"], int(counts[0]) if len(counts) else 0)  # counts fall from id 1 on; id 0 must come first
    return torch.cat([torch.tensor([zero]), counts])
