"""A run's folder: whether a config can resume the run in it, and which of its checkpoints to use."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from comera_rec.distributed import WORLD
from comera_rec.training.checkpoint import Checkpoint, checkpoint_at, latest_checkpoint, open_checkpoint
from comera_rec.training.config import RunConfig, parse_config
from comera_rec.training.model import Schema, build_model
from data_pipeline.errors import UserError
from data_pipeline.manifest import MANIFEST_NAME, Manifest, file_sha256, read_manifest

CHECKPOINTS = "checkpoints"
_WRITTEN = ("config.json", "metrics.jsonl", "result.json", "report.html")
# Keys, or what they start with, that may change when a run resumes.
_FREE = ("output", "training.", "data.path", "data.prefetch", "data.eval_batch_size")


def require_fit(config: RunConfig, schema: Schema, manifest: Manifest) -> None:
    """Raise ValueError for a config that doesn't fit its data, its output or the number of processes."""
    training, data = config.training, config.data
    if Path(config.output).exists() and not Path(config.output).is_dir():
        raise UserError(f"output is {config.output}, which is a file: give a folder")
    _require_run_folder(Path(config.output))
    if config.ranks and config.tables.format != "tt" and config.linears.format != "tt":
        raise UserError("[ranks] adapts TT ranks, and neither tables nor linear layers have any: add ranks=none, or use format tt")
    if not schema.sparse:
        raise UserError(f"{data.path} has no categories, so a model would have no tables: give data with a category or a list")
    if training.eval_every and not manifest.splits["val"].rows:
        raise UserError(
            f"training.eval_every is {training.eval_every} but {data.path} has no validation rows: "
            "preprocess with a larger --val-fraction, or set training.eval_every=0"
        )
    if training.task_weights and len(training.task_weights) != len(schema.labels):
        raise UserError(
            f"training.task_weights has {len(training.task_weights)} numbers and {data.path} the labels "
            f"{', '.join(schema.labels)}: give one for each"
        )
    if few := [name for name in ("val", "test") if 0 < manifest.splits[name].rows < WORLD.size]:
        raise UserError(
            f"the {few[0]} split of {data.path} has fewer rows than there are processes: preprocess with a larger "
            f"--{few[0]}-fraction, or use fewer processes"
        )
    if data.batch_size % WORLD.size:
        raise UserError(
            f"data.batch_size is {data.batch_size}, which {WORLD.size} processes can't share equally: "
            f"give a multiple of {WORLD.size}"
        )


def _require_run_folder(folder: Path) -> None:
    """Raise ValueError if a run would replace files of something else; a log of the run's own output may be in its folder."""
    present = [name for name in _WRITTEN if (folder / name).exists()]
    try:
        is_run = not present or {"output", "data", "training"} <= json.loads((folder / "config.json").read_text()).keys()
    except (OSError, ValueError, AttributeError):
        is_run = False
    if not is_run:
        raise UserError(f"{folder} holds {', '.join(present)} of something else than a run: choose another output")


def require_same_run(
    config: RunConfig, schema: Schema, manifest: Manifest, record: dict[str, Any], after: dict[str, Any] | None
) -> None:
    """Raise ValueError if a run of this config on this data set can't continue the one that a checkpoint recorded.

    `after` is the run and step that it has to have started after; None allows any start.
    """
    if differing := _differing(config, record):
        raise UserError(
            f"{config.output} holds another run: its config differs in {', '.join(differing)}; "
            "choose another output, or remove the folder to start anew"
        )
    require_data(config.output, Schema.from_dict(record["schema"]), config.data.path, schema)
    if record["data"] != fingerprint(manifest):
        raise UserError(
            f"{config.output} was trained on other rows than {config.data.path} holds: "
            "give the same data set, or choose another output"
        )
    if after not in (None, known := record.get("after", after)):  # records of earlier versions don't say
        started, not_after = (f"after step {each['step']} of {each['run']}" if each else "anew" for each in (known, after))
        raise UserError(
            f"{config.output} holds another run: it started {started}, not {not_after}; "
            "choose another output, or resume it without --after"
        )


def require_successor(config: RunConfig, schema: Schema, run: Path, record: dict[str, Any]) -> None:
    """Raise ValueError unless a new run can start from the one of a record: the same model, and its vocabularies, perhaps extended.

    Ids keep their meaning along the data sets that `comera transform` made of each other.
    """
    if differing := _differing(config, record, free=("seed", "data.")):
        raise UserError(f"{run} has another config than the new run (in {', '.join(differing)}): give the same one")
    known, folder = Schema.from_dict(record["schema"]), config.data.path
    if known.labels != schema.labels:  # a model's outputs are in the order of its labels
        raise UserError(
            f"{folder} has the labels {', '.join(schema.labels) or 'none'} where {run} was trained with {', '.join(known.labels)}: "
            "give data with the same labels in the same order"
        )
    while differing := known.differences(replace(schema, labels=known.labels)):  # days between may have none
        origin = read_manifest(folder).transformed
        folder = origin.data if origin else folder
        path = Path(folder, MANIFEST_NAME)
        if origin is None or not path.exists() or file_sha256(path) != origin.manifest_sha256:
            raise UserError(
                f"{config.data.path} doesn't extend the vocabularies that {run} was trained with (they differ in "
                f"{', '.join(differing)}): make it by `comera transform --extend` from the run's data set, and keep that"
            )
        schema = Schema.from_manifest(read_manifest(folder))


def require_data(run: str | Path, known: Schema, data: str | Path, schema: Schema) -> None:
    """Raise ValueError if a data set has other columns or vocabularies than the one that a run was trained on."""
    if differing := known.differences(schema):
        raise UserError(
            f"{run} was trained on other data than {data} holds (they differ in {', '.join(differing)}): "
            "give the data set it was trained on"
        )


def open_run(folder: str | Path, *, last: bool = False) -> Checkpoint:
    """Open the checkpoint of a run's best step if it keeps that (`training.keep_best`); otherwise, or with `last`, its last one.

    Raises:
        ValueError: if the folder holds no checkpoint, or no longer that of its best step.
    """
    checkpoints = Path(folder) / CHECKPOINTS
    path = latest_checkpoint(checkpoints)
    if path is None:
        raise UserError(f"{folder} holds no checkpoint: give a run's folder, as written by `comera train`")
    checkpoint = open_checkpoint(path)
    step = checkpoint.record["best"]["step"]
    if last or step in (None, checkpoint.record["step"]) or not checkpoint.record["config"]["training"]["keep_best"]:
        return checkpoint
    best = checkpoint_at(checkpoints, step)
    if best is None:
        raise UserError(f"{folder} no longer holds the checkpoint of its best step, {step}: take the last one (--last)")
    return open_checkpoint(best)


def load_run(folder: str | Path, *, last: bool = False) -> tuple[nn.Module, RunConfig, Schema]:
    """Return the model of the checkpoint that `open_run` opens, its config and the schema of its data.

    Raises:
        ValueError: as `open_run`.
    """
    try:
        opened = open_run(folder, last=last)
        config, schema = parse_config(opened.record["config"]), Schema.from_dict(opened.record["schema"])
        model = build_model(config, schema)
        model.load_state_dict(opened.read_named("model/"))  # with its ranks
        return model.eval(), config, schema
    except (LookupError, TypeError, AttributeError, ValidationError, RuntimeError, MemoryError, OverflowError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{folder} holds a checkpoint whose model can't be made ({reason}): give another run") from error


def load_teacher(config: RunConfig, schema: Schema, device: torch.device) -> nn.Module | None:
    """Return the model of the run that `training.teacher` names; raise ValueError if it predicts from other columns."""
    if config.training.teacher is None:
        return None
    model, _, of_teacher = load_run(config.training.teacher)
    require_data(f"training.teacher {config.training.teacher}", of_teacher, config.data.path, schema)
    return model.requires_grad_(False).to(device)


def fingerprint(manifest: Manifest) -> str:
    """Return a hash that identifies a data set's rows."""
    shards = [(name, s.rows, s.bytes, s.sha256) for name, split in manifest.splits.items() for s in split.shards]
    return hashlib.sha256(json.dumps(shards).encode()).hexdigest()


def _differing(config: RunConfig, record: dict[str, Any], free: tuple[str, ...] = ()) -> list[str]:
    """Name the keys in which a config differs from the one that a checkpoint recorded, except those that may change."""
    present, recorded = config.to_dict(), parse_config(record["config"]).to_dict()
    differing: list[str] = []
    for name, value in present.items():
        other = recorded[name]
        if isinstance(value, dict) and isinstance(other, dict):
            differing += [f"{name}.{key}" for key in value if value[key] != other[key]]
        elif value != other:  # [ranks] may be in one of them only
            differing.append(name)
    return [key for key in differing if not key.startswith(_FREE + free)]
