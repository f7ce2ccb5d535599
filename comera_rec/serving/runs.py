"""Export of a trained run: its model as a package, evaluated on the test split, which encodes rows as the run's data set does."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from comera_rec.data import ParquetBatches
from comera_rec.serving.export import Run, put_in_place, write_package
from comera_rec.serving.package import ModelMetadata, RunMetadata, ServingModel
from comera_rec.serving.vocabularies import check_vocabularies, encoding_of
from comera_rec.training.evaluation import OneClass, evaluate
from comera_rec.training.model import Schema
from comera_rec.training.runs import load_run, require_data
from data_pipeline.errors import UserError
from data_pipeline.manifest import read_manifest


def export_run(
    run: Path, output: Path, *, data: Path | None = None, form: str = "portable", dtype: str = "float32", last: bool = False
) -> ModelMetadata:
    """Write a run as a package, or as ONNX. Both take dense [B, I], values [V] and lengths [F * B], and return probabilities.

    Args:
        run: folder of a run.
        output, form, dtype: as for `comera_rec.export`.
        data: folder of the data set that the run was trained on; None takes the one in the run's config.
        last: use the last checkpoint even if the run keeps its best one.

    Raises:
        ValueError: for a folder without a checkpoint, a data set that is missing or isn't the run's, and as `comera_rec.export`.
    """
    return put_in_place(output, lambda path, package: _write(run, path, package, data, form, dtype, last))


def _write(
    run: Path, path: Path, package: ServingModel | None, data: Path | None, form: str, dtype: str, last: bool
) -> ModelMetadata:
    model, config, schema = load_run(run, last=last)
    hint = "" if data else "; the run was trained on this folder: name another with --data"
    data = data or Path(config.data.path)
    try:
        manifest = read_manifest(data)
    except UserError as error:
        raise UserError(f"{error}{hint}") from error
    require_data(run, schema, data, Schema.from_manifest(manifest))
    if package is not None:
        try:
            check_vocabularies(package.metadata, manifest, data)
        except ValueError as error:
            raise UserError(f"{package.path} is not for the ids of {data} ({error}): export to {package.path.name}") from error
    split = next(name for name in ("test", "val", "train") if manifest.splits[name].rows)  # as the run was evaluated
    columns = list(schema.sparse)
    first = next(iter(ParquetBatches(data, split, batch_size=8)))
    facts = {"integer_columns": str(len(schema.dense)), "table_rows": " ".join(map(str, schema.sparse.values()))}  # for C++
    sample = first.dense, _ordered(first.sparse, columns)
    metadata, packaged = write_package(_Probabilities(model), sample, path, package, form=form, dtype=dtype, facts=facts)
    if path.suffix == ".onnx":
        return metadata
    batches = ParquetBatches(data, split, batch_size=config.data.eval_batch_size)
    try:
        trained, served = (evaluate(each, batches, torch.device("cpu")) for each in (model, _Packaged(packaged, columns)))
    except OneClass:
        trained = served = {"auc": None, "ne": None}
    record = RunMetadata(
        **encoding_of(manifest),
        auc=served["auc"],
        ne=served["ne"],
        trained_auc=trained["auc"],
        trained_ne=trained["ne"],
        data=str(data.absolute()),
        labels=schema.labels,
    )
    return replace(metadata, run=record)


class _Probabilities(nn.Module):
    """A run's model with the probabilities [B] of its label as its output; [B, L] for several labels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> dict[str, Tensor]:
        probabilities = self.model(dense, features).sigmoid()
        if probabilities.shape[1] == 1:  # ONNX can't squeeze another size
            probabilities = probabilities.squeeze(1)
        return {"probabilities": probabilities}


class _Packaged(nn.Module):
    """A package with the signature that evaluation calls."""

    def __init__(self, run: Run, columns: list[str]) -> None:
        super().__init__()
        self.run, self.columns = run, columns

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        ordered = _ordered(features, self.columns)
        (probabilities,) = self.run([dense, ordered.values(), ordered.lengths()])
        logits: Tensor = probabilities.double().logit(eps=1e-12).view(len(dense), -1)
        return logits


def _ordered(features: KeyedJaggedTensor, columns: list[str]) -> KeyedJaggedTensor:
    """Return features with int64 ids in the order of columns."""
    ordered = features.permute([features.keys().index(name) for name in columns])
    return KeyedJaggedTensor(columns, ordered.values().long(), lengths=ordered.lengths().long())
