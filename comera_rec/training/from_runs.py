"""Starts of runs from other ones: of a compressed run from a trained dense one, by TT-SVD, or of a run on later data."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from comera_rec.convert import fit_tables_
from comera_rec.nn import TTEmbeddingBag, TTModule, named_tt_modules
from comera_rec.training.checkpoint import latest_checkpoint
from comera_rec.training.config import RunConfig, parse_config
from comera_rec.training.model import Schema, build_model, table_configs
from comera_rec.training.runs import CHECKPOINTS, open_run, require_data, require_successor
from comera_rec.training.trainer import Trainer
from data_pipeline.errors import UserError
from data_pipeline.manifest import read_manifest


def compress_run(dense: str | Path, config: RunConfig) -> Trainer:
    """Write a run's first checkpoint from the weights of a trained dense one; `comera train` resumes from it.

    All tables share the size that `tables.compression` (or the given ranks) allows; their singular values decide how much each
    gets. A row's errors are weighted by its squared gradients, which the dense tables' Adagrad has summed up. The dense model is
    mapped from temporary files, so memory holds only one table's blocks and the compressed model.

    Args:
        dense: folder of a run with dense tables on the same data.
        config: the compressed run; its output must hold no checkpoint yet.

    Raises:
        ValueError: if there is no such checkpoint, the output holds one already, or the two runs differ in data, format or sizes.

    Returns:
        The compressed run, at step 0.
    """
    if config.tables.format != "tt":
        raise UserError(f"tables.format is {config.tables.format!r}: compressing needs 'tt', so set tables.format=tt")
    if latest_checkpoint(Path(config.output) / CHECKPOINTS) is not None:
        raise UserError(f"{config.output} holds checkpoints already: give a new output")
    checkpoint = open_run(dense)
    schema = Schema.from_dict(checkpoint.record["schema"])
    if config.model != parse_config(checkpoint.record["config"]).model:
        raise UserError(f"{dense} was trained with other sizes of [model]: give the same embedding_dim, dense_arch and over_arch")
    require_data(dense, schema, config.data.path, Schema.from_manifest(read_manifest(config.data.path)))
    model = build_model(config, schema)
    importance = checkpoint.read_named("tables/", "/momentum1")
    copy_weights_(model, checkpoint.read_named("model/"), _table_budget(config, schema), importance)
    trainer = Trainer(config, model)
    with trainer.locked():
        trainer.save()
    return trainer


@torch.no_grad()
def copy_weights_(model: nn.Module, dense: dict[str, Tensor], table_budget: int, importance: dict[str, Tensor]) -> None:
    """Give a model the weights of its dense twin: TT modules by TT-SVD, all tables within one budget, the rest copied.

    `importance` has the weights of the squared errors of a table's rows, by the table's name.
    """
    tt_modules = dict(named_tt_modules(model))
    tables = {name: module for name, module in tt_modules.items() if isinstance(module, TTEmbeddingBag)}
    blocks = {block for table in tables.values() for block in table.hot_blocks()}
    weights = [_dense_weight(name, module, dense) for name, module in tables.items()]
    fit_tables_(list(tables.values()), weights, table_budget, [importance.get(name.rpartition(".")[2]) for name in tables])
    for name, module in tt_modules.items():
        if name not in tables and module not in blocks:
            module.set_dense_matrix_(_dense_weight(name, module, dense).mT)
    for key, value in model.state_dict().items():
        name, _, kind = key.rpartition(".")
        if name not in tt_modules or not kind.startswith(("core_", "rank_")):
            value.copy_(dense[key])


def _dense_weight(name: str, module: TTModule, dense: dict[str, Tensor]) -> Tensor:
    """Return the dense weight that a TT module replaces, by the names of `TTEmbeddingBagCollection` and `TTLinear`."""
    key = f"{name}.weight"
    if isinstance(module, TTEmbeddingBag):
        collection, _, table = name.rpartition(".tt_bags.")
        key = f"{collection}.dense_bags.embedding_bags.{table}.weight"
    if key not in dense:
        raise UserError(f"the dense checkpoint holds no {key}: give a run trained with tables.format=dense linears.format=dense")
    return dense[key]


def _table_budget(config: RunConfig, schema: Schema) -> int:
    """Return the number of parameters for all TT tables."""
    tables: list[Any] = table_configs(config, schema)  # `TTEmbeddingBagConfig`s, with or without ranks
    if config.tables.compression is None:
        return sum(table.num_params for table in tables if table.is_tt)
    dense = sum(table.num_embeddings * table.embedding_dim for table in tables)
    small = sum(table.num_params for table in tables if not table.is_tt)
    return int(dense / config.tables.compression) - small


def start_after(run: Path, config: RunConfig) -> dict[str, Any]:
    """Write a run's first checkpoint unless there is one; return the run and step that it is to start `after`, for `Trainer`.

    Known ids keep their rows and the optimizer's state. A dense table gets an initial row for each new id. A TT table keeps its
    cores while they have room for the ids; beyond that its first core gets slices, as an id's first digit is the most significant.

    Args:
        run: folder of a run; its best checkpoint if it keeps that, or else its last.
        config: the new run, with the same model, tables, layers, optimizer and ranks.

    Raises:
        ValueError: if there is no such checkpoint, the configs differ, or the data doesn't extend the run's vocabularies.
    """
    checkpoint = open_run(run)
    after = {"run": str(run.resolve()), "step": checkpoint.record["step"]}
    if latest_checkpoint(Path(config.output) / CHECKPOINTS) is not None:
        return after
    schema = Schema.from_manifest(read_manifest(config.data.path))
    require_successor(config, schema, run, checkpoint.record)
    torch.manual_seed(config.seed)
    trainer = Trainer(config, build_model(config, schema), after=after)
    trainer.state.load(checkpoint, grown=True)
    if trainer.scheduler:
        trainer.scheduler.load_state_dict(checkpoint.record["scheduler"])
        trainer.scheduler.record_sizes()
    with trainer.locked():
        trainer.save()
    return after
