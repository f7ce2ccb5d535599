"""Start of a compressed run from a trained dense one: tables and layers by TT-SVD, everything else copied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from comera_rec.convert import fit_tables_
from comera_rec.nn import TTEmbeddingBag, TTModule, named_tt_modules
from comera_rec.training.checkpoint import Checkpoint, latest_checkpoint
from comera_rec.training.config import RunConfig, parse_config
from comera_rec.training.model import Schema, build_model, table_configs
from comera_rec.training.runs import CHECKPOINTS, open_run
from comera_rec.training.trainer import Trainer
from data_pipeline.errors import UserError


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
    model = build_model(config, schema)
    weights = _named(checkpoint, "model/", "")
    copy_weights_(model, weights, _table_budget(config, schema), _named(checkpoint, "tables/", "/momentum1"))
    trainer = Trainer(config, model)
    if differing := schema.differences(trainer.schema):
        raise UserError(
            f"{dense} was trained on other data than {config.data.path} (they differ in {', '.join(differing)}): "
            "give the data set it was trained on"
        )
    trainer.save()
    trainer.writer.wait()
    return trainer


def _named(checkpoint: Checkpoint, prefix: str, suffix: str) -> dict[str, Tensor]:
    """Read tensors, keyed by the part of their name between prefix and suffix."""
    names = [name for name in checkpoint.sizes if name.startswith(prefix) and name.endswith(suffix)]
    return {name.removeprefix(prefix).removesuffix(suffix): value for name, value in checkpoint.read(names).items()}


def copy_weights_(model: nn.Module, dense: dict[str, Tensor], table_budget: int, importance: dict[str, Tensor]) -> None:
    """Give a model the weights of its dense twin: TT modules by TT-SVD, all tables within one budget, the rest copied.

    `importance` has the weights of the squared errors of a table's rows, by the table's name.
    """
    tt_modules = dict(named_tt_modules(model))
    tables = {name: module for name, module in tt_modules.items() if isinstance(module, TTEmbeddingBag)}
    table_modules = {module for table in tables.values() for module in (table, *table.hot_blocks())}
    weights = [_dense_weight(name, module, dense) for name, module in tables.items()]
    rows = [importance.get(name.rpartition(".")[2]) for name in tables]
    fit_tables_(list(tables.values()), weights, table_budget, rows)
    for name, module in tt_modules.items():
        if module not in table_modules:
            module.set_dense_matrix_(_dense_weight(name, module, dense).mT)
    with torch.no_grad():
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
