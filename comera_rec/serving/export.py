"""From a trained run to a package."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn
from torch._inductor import aoti_compile_and_package
from torch.export import Dim
from torchrec.models.dlrm import DLRM

from comera_rec.ops.native import LIBRARY
from comera_rec.ops.served_bags import DTYPES, ServedTable
from comera_rec.serving.fast import FastTables
from comera_rec.serving.flat import FlatModel
from comera_rec.serving.package import FORMAT_VERSION, METADATA_KEY, ModelMetadata
from comera_rec.serving.portable import PortableTables
from comera_rec.serving.tables import served_tables
from comera_rec.training.trainer import Schema, load_run
from data_pipeline.manifest import Manifest, read_manifest

FORMS = {"portable": PortableTables, "fast": FastTables}


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """How a run is exported.

    Attributes:
        run: folder of a run.
        output: the file to write.
        data: folder of the data set it was trained on; None takes the run's own.
        form: "portable" or "fast".
        dtype: of tables: "float32", "bfloat16" or "int8".
        expand: bytes for rows of the most frequent ids, formed in advance.
    """

    run: Path
    output: Path
    data: Path | None = None
    form: str = "portable"
    dtype: str = "float32"
    expand: int = 0

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ValueError(f"form is {self.form!r}: choose {' or '.join(map(repr, FORMS))}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}: choose one of {', '.join(map(repr, DTYPES))}")
        if self.expand < 0:
            raise ValueError(f"expand is {self.expand}: give bytes, or 0 for none")


def export_run(options: ExportOptions) -> ModelMetadata:
    """Compile a run's last checkpoint into a package, measure it on the test split, and write it.

    Returns:
        What the package says about itself.

    Raises:
        ValueError: for a folder without checkpoint, a model without tables, a data set that is not there or another one.
    """
    model, config, schema = load_run(options.run)
    data = options.data or Path(config.data.path)
    manifest = read_manifest(data)
    if Schema.of(manifest) != schema:
        raise ValueError(f"{options.run} was trained with other columns or vocabularies than {data} holds: give its own data set")
    if not isinstance(model, DLRM):
        raise ValueError(f"{options.run} holds a model without tables (tables.format is 'off'): export one that has them")
    tables = served_tables(model.sparse_arch.embedding_bag_collection)
    flat = FlatModel(model, FORMS[options.form](tables, DTYPES[options.dtype])).eval()
    metadata = _metadata(options, schema, manifest, data, tables)
    options.output.absolute().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{options.output.name}.", dir=options.output.absolute().parent) as work:
        finished = Path(work) / "model.pt2"
        compile_package(flat, len(schema.dense), len(schema.sparse), finished, metadata)
        if options.form == "fast":
            shutil.copyfile(LIBRARY, Path(work) / LIBRARY.name).replace(options.output.with_name(LIBRARY.name))
        finished.replace(options.output)
    return metadata


def compile_package(flat: nn.Module, integers: int, features: int, path: Path, metadata: ModelMetadata) -> None:
    """Compile a model with flat inputs into a package."""
    batch, values = Dim("batch"), Dim("values")
    example = 3
    inputs = (
        torch.zeros(example, integers),
        torch.zeros(features * example, dtype=torch.long),
        torch.ones(features * example).long(),
    )
    shapes = {"dense": {0: batch}, "values": {0: values}, "lengths": {0: features * batch}}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(flat, inputs, dynamic_shapes=shapes, strict=True)
        aoti_compile_and_package(
            program, package_path=str(path), inductor_configs={"aot_inductor.metadata": {METADATA_KEY: metadata.to_json()}}
        )


def _metadata(options: ExportOptions, schema: Schema, manifest: Manifest, data: Path, tables: list[ServedTable]) -> ModelMetadata:
    vocabularies = {column.name: column.vocabulary for column in manifest.categorical_columns}
    return ModelMetadata(
        format_version=FORMAT_VERSION,
        dense=schema.dense,
        categorical=schema.sparse,
        checksums={name: None if shard is None else shard.sha256 for name, shard in vocabularies.items()},
        library_version=version("comera-rec"),
        torch_version=torch.__version__,
        form=options.form,
        dtype=options.dtype,
        formed_rows=sum(len(table.formed) for table in tables if table.cores),
        auc=None,
        ne=None,
        trained_auc=None,
        trained_ne=None,
        data=str(data.absolute()),
    )
