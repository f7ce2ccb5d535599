"""The vocabularies that encode raw values as a model's ids, and the check that the model was trained with them."""

from pathlib import Path
from typing import Any

from comera_rec.serving.package import FeatureInput, ModelMetadata, RunMetadata
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


def encoding_of(manifest: Manifest) -> dict[str, Any]:
    """Return how a data set encodes rows, as `RunMetadata` has it."""
    return {
        "dense": tuple(column.name for column in manifest.integer_columns),
        "offsets": tuple(column.scaling for column in manifest.integer_columns),
        "checksums": {c.name: c.vocabulary.sha256 if c.vocabulary else None for c in manifest.categorical_columns},
    }


def check_vocabularies(metadata: ModelMetadata, manifest: Manifest, folder: Path) -> None:
    """Check that a data set's ids mean the same as the model's.

    Raises:
        ValueError: naming the columns that differ.
    """
    run, actual = run_of(metadata), encoding_of(manifest)
    if actual["dense"] != run.dense:
        stated = f"{folder} has integer columns {', '.join(actual['dense'])}, the model {', '.join(run.dense)}"
        raise UserError(f"{stated}: give the model's data set")
    keys = next(each.keys for each in metadata.inputs if isinstance(each, FeatureInput))
    theirs = {name: (rows, run.checksums[name]) for name, rows in keys.items()}
    ours = {c.name: (c.num_embeddings, actual["checksums"][c.name]) for c in manifest.categorical_columns}
    if list(ours.items()) != list(theirs.items()):
        differing = [name for name in {**theirs, **ours} if ours.get(name) != theirs.get(name)]
        raise UserError(
            f"{folder} has other vocabularies than the model was trained with (in {', '.join(differing) or 'other order'}): "
            "give the model's data set, or one that `comera transform` made with it"
        )
    if actual["offsets"] != run.offsets:
        raise UserError(f"{folder} has other offsets of integer columns than the model has: give the model's data set")
