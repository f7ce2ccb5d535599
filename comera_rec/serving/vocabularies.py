"""The vocabularies that encode raw values as a model's ids, and the check that the model was trained with them."""

from __future__ import annotations

from pathlib import Path

from comera_rec.serving.package import FeatureInput, ModelMetadata, Offset, RunMetadata
from data_pipeline.encoder import RequestEncoder
from data_pipeline.errors import UserError
from data_pipeline.manifest import Manifest


def open_vocabularies(metadata: ModelMetadata, data: Path | None = None) -> RequestEncoder:
    """Return the encoder of raw rows for a model.

    Args:
        metadata: the metadata of the model.
        data: folder of a data set; None takes the one that the metadata names.

    Raises:
        ValueError: if there is no data set, or its columns or vocabularies differ from the model's.
    """
    folder = data or Path(run_of(metadata).data)
    try:
        encoder = RequestEncoder(folder)
    except ValueError as error:
        hint = "" if data else "; the model was trained on this folder: name another with --data"
        raise UserError(f"{error}{hint}") from error
    check_vocabularies(metadata, encoder.manifest, folder)
    return encoder


def run_of(metadata: ModelMetadata) -> RunMetadata:
    """Return what a package says of its run; raise ValueError for a package of another model, whose ids no data set explains."""
    if metadata.run is None:
        raise UserError("the model is not a run of `comera train`: encode rows yourself, and send or pass tensors")
    return metadata.run


def offsets_of(manifest: Manifest) -> tuple[Offset, ...]:
    """Return the number added to each integer column before its logarithm, or its mean and scale; None for neither."""
    return tuple(
        column.offset
        if column.transform == "log"
        else (column.mean, column.scale)
        if column.mean is not None and column.scale is not None
        else None
        for column in manifest.integer_columns
    )


def check_vocabularies(metadata: ModelMetadata, manifest: Manifest, folder: Path) -> None:
    """Check that a data set's ids mean the same as the model's.

    Raises:
        ValueError: naming the columns that differ.
    """
    run = run_of(metadata)
    dense = tuple(column.name for column in manifest.integer_columns)
    if dense != run.dense:
        raise UserError(
            f"{folder} has integer columns {', '.join(dense)}, the model {', '.join(run.dense)}: give the model's data set"
        )
    actual = {
        column.name: (column.num_embeddings, column.vocabulary.sha256 if column.vocabulary else None)
        for column in manifest.categorical_columns
    }
    keys = next(each.keys for each in metadata.inputs if isinstance(each, FeatureInput))
    expected = {name: (rows, run.checksums[name]) for name, rows in keys.items()}
    if list(actual) != list(expected) or actual != expected:
        differing = [name for name in {**expected, **actual} if actual.get(name) != expected.get(name)]
        raise UserError(
            f"{folder} has other vocabularies than the model was trained with (in {', '.join(differing) or 'other order'}): "
            "give the model's data set, or one that `comera transform` made with it"
        )
    if offsets_of(manifest) != run.offsets:
        raise UserError(f"{folder} has other offsets of integer columns than the model has: give the model's data set")
