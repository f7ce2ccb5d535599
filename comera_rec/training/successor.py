"""Start of a run from another one, on later data: weights, ranks and optimizer state, with rows for new ids."""

from __future__ import annotations

from pathlib import Path

import torch

from comera_rec.training.checkpoint import latest_checkpoint
from comera_rec.training.config import RunConfig
from comera_rec.training.model import Schema, build_model
from comera_rec.training.runs import CHECKPOINTS, open_run, require_successor
from comera_rec.training.trainer import Trainer
from data_pipeline.manifest import read_manifest


def start_after(run: Path, config: RunConfig) -> None:
    """Write a run's first checkpoint, from which `Trainer` resumes; keep the run's last one if there is one.

    Known ids keep their rows and the optimizer's state. A dense table gets an initial row for each new id. A TT table keeps its
    cores while they have room for the ids; beyond that its first core gets slices, as an id's first digit is the most significant.

    Args:
        run: folder of a run; its best checkpoint if it keeps that, or else its last.
        config: the new run, with the same model, tables, layers, optimizer and ranks.

    Raises:
        ValueError: if there is no such checkpoint, the configs differ, or the data doesn't extend the run's vocabularies.
    """
    if latest_checkpoint(Path(config.output) / CHECKPOINTS) is not None:
        return
    checkpoint = open_run(run)
    schema = Schema.from_manifest(read_manifest(config.data.path))
    require_successor(config, schema, run, checkpoint.record)
    torch.manual_seed(config.seed)
    trainer = Trainer(config, build_model(config, schema))
    trainer.state.load(checkpoint, grown=True)
    if trainer.scheduler:
        trainer.scheduler.load_state_dict(checkpoint.record["scheduler"])
    trainer.save()
    trainer.writer.wait()
