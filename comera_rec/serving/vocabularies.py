"""The vocabularies that turn raw values into a model's ids, and the proof that they are the ones it was trained with."""

from __future__ import annotations

from pathlib import Path

from comera_rec.serving.package import ModelMetadata, Offset
from data_pipeline.encoder import RequestEncoder
from data_pipeline.manifest import Manifest


def open_vocabularies(metadata: ModelMetadata, data: Path | None = None) -> RequestEncoder:
    """The encoder of raw rows for a model.

    Args:
        metadata: of the model.
        data: folder of a data set; None takes the one that the model was trained on, as it recorded.

    Raises:
        ValueError: there is no data set, or it has other columns or vocabularies than the model.
    """
    folder = data or Path(metadata.data)
    try:
        encoder = RequestEncoder(folder)
    except ValueError as error:
        hint = "" if data else "; the model names this folder as the one it was trained on, name another with --data"
        raise ValueError(f"{error}{hint}") from error
    check_vocabularies(metadata, encoder.manifest, folder)
    return encoder


def offsets_of(manifest: Manifest) -> tuple[Offset, ...]:
    """What a data set adds to each number before its logarithm, or mean and scale; None where numbers are taken as they come."""
    return tuple(
        column.offset
        if column.transform == "log"
        else (column.mean, column.scale)
        if column.mean is not None and column.scale is not None
        else None
        for column in manifest.integer_columns
    )


def check_vocabularies(metadata: ModelMetadata, manifest: Manifest, folder: Path) -> None:
    """Check that a data set's ids mean what the model's do.

    Raises:
        ValueError: naming the columns that differ.
    """
    dense = tuple(column.name for column in manifest.integer_columns)
    if dense != metadata.dense:
        raise ValueError(
            f"{folder} has integer columns {', '.join(dense)}, the model {', '.join(metadata.dense)}: give its data set"
        )
    found = {
        column.name: (column.num_embeddings, column.vocabulary.sha256 if column.vocabulary else None)
        for column in manifest.categorical_columns
    }
    wanted = {name: (rows, metadata.checksums[name]) for name, rows in metadata.categorical.items()}
    if list(found) != list(wanted) or found != wanted:
        differing = [name for name in {**wanted, **found} if found.get(name) != wanted.get(name)]
        raise ValueError(
            f"{folder} has other vocabularies than the model was trained with (in {', '.join(differing) or 'other order'}): "
            "give the model's data set, or one that `comera transform` made with it"
        )
    if offsets_of(manifest) != metadata.offsets:
        raise ValueError(f"{folder} has other offsets of integer columns than the model was trained with: give its data set")
