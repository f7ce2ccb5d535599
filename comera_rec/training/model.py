"""Models and their optimizers, built from a config and a data set's columns.

B batch size, L labels.
"""

import re
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Annotated, Any, cast

import torch
from pydantic import Field, TypeAdapter
from torch import nn
from torchrec import EmbeddingBagCollection
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.keyed import KeyedOptimizer

from comera_rec.nn import replace_modules_
from comera_rec.rank import rank_param_groups
from comera_rec.recsys import build_dlrm
from comera_rec.training.config import OptimizerConfig, RunConfig, TablesConfig
from data_pipeline.errors import UserError
from data_pipeline.manifest import Manifest
from data_pipeline.schema import LABEL

_OF_FEW = 0.5
"""Share of occurrences that the most frequent twentieth of the ids must have for hot rows."""


@dataclass(frozen=True, kw_only=True)
class Schema:
    """What a model must know about its data: labels, the integer columns, and the categorical ones with their table sizes.

    `vocabularies` has the SHA-256 of the vocabulary file of each column that has one. `first` has, for columns whose vocabulary was
    extended, the table size before: it decides the table's form and its shape, so that a model can grow with the vocabulary.
    `heads` has, for columns in order of similarity, the share of occurrences that the most frequent twentieth of the values has.
    `scalings` has what the numbers of each integer column were scaled by (`IntegerColumn.scaling`).
    """

    dense: tuple[str, ...]
    sparse: dict[str, Annotated[int, Field(ge=1, lt=2**63)]]
    vocabularies: dict[str, str] = field(default_factory=dict)
    labels: tuple[str, ...] = (LABEL,)
    first: dict[str, int] = field(default_factory=dict)
    heads: dict[str, float] = field(default_factory=dict)
    scalings: dict[str, float | tuple[float, float] | None] = field(default_factory=dict)

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> "Schema":
        """Return the schema of a preprocessed data set."""
        return cls(
            dense=tuple(column.name for column in manifest.integer_columns),
            sparse={column.name: column.num_embeddings for column in manifest.categorical_columns},
            vocabularies={
                c.name: c.vocabulary.sha256 for c in manifest.categorical_columns if c.vocabulary and c.vocabulary.sha256
            },
            labels=tuple(label.name for label in manifest.labels),
            first={column.name: column.grown[0] for column in manifest.categorical_columns if column.grown},
            heads={column.name: column.head for column in manifest.categorical_columns if column.head is not None},
            scalings={column.name: column.scaling for column in manifest.integer_columns},
        )

    def differences(self, other: "Schema") -> list[str]:
        """List what differs: columns by name, "the labels" or "the numbers". Encodings of columns count where both are known."""

        def differs(name: str) -> bool:
            kinds = (self.vocabularies, other.vocabularies), (self.scalings, other.scalings)
            changed = any(name in ours and name in theirs and ours[name] != theirs[name] for ours, theirs in kinds)
            return changed or self.sparse.get(name) != other.sparse.get(name)

        labels, integers = self.labels != other.labels, self.dense != other.dense
        columns = self.sparse | other.sparse | self.scalings
        return ["the labels"] * labels + ["the numbers"] * integers + list(filter(differs, columns))

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> "Schema":
        """Read what `asdict` and JSON made."""
        return TypeAdapter(cls).validate_python(plain)


def build_model(config: RunConfig, schema: Schema, device: str = "cpu") -> nn.Module:
    """Build the model that a config describes, for data of a schema.

    It is called as `model(dense_features, sparse_features)` and returns [B, L] logits, one for each label.
    """
    return build_dlrm(
        table_configs(config, schema),
        dense_in_features=len(schema.dense),
        dense_arch_layer_sizes=[*config.model.dense_arch, config.model.embedding_dim],
        over_arch_layer_sizes=[*config.model.over_arch, len(schema.labels)],
        linears=config.linears if config.linears.format == "tt" else None,
        cross_layers=config.model.cross_layers if config.model.architecture == "dcn" else 0,
        cross_rank=config.model.cross_rank,
        device=device,
    )


def table_configs(config: RunConfig, schema: Schema) -> list[EmbeddingBagConfig]:
    """Return configs of a model's tables, compressed as configured.

    Tables are named after their columns, percent-encoded where torch would refuse the name of a submodule: `a.b` is `a%2Eb`.
    """
    tables = _dense_table_configs(config, schema)
    if config.tables.format == "tt":
        config.tables.require_tables([table.name for table in tables])
        compression: TablesConfig = config.tables
        unordered = [k for k, table in enumerate(tables) if table.name not in schema.vocabularies]  # hashes have no order
        names = [table.name for table in tables if not compression.reason_to_stay_dense(table)]
        heads = [schema.heads.get(name, 1.0) for name in names if name in schema.vocabularies]
        if compression.hot_rows == "auto" and heads and fmean(heads) < _OF_FEW:
            compression = replace(compression, hot_rows=0)
        tables = compression.table_configs(tables, unordered=unordered)
    for table in tables:
        table.num_embeddings = schema.sparse[table.name]
        if getattr(table, "shape", None):
            table.shape = table.shape.covering(table.num_embeddings)
        table.name = _submodule_name(table.name)
    return tables


def _submodule_name(name: str) -> str:
    """Encode a name so that `urllib.parse.unquote` decodes it."""
    encoded = re.sub(r"\.|%(?=[0-9A-Fa-f]{2})", lambda match: f"%{ord(match[0]):02X}", name)
    return f"%{ord(encoded[0]):02X}{encoded[1:]}" if hasattr(nn.ModuleDict(), encoded) else encoded


def with_reachable_compression(config: RunConfig, schema: Schema) -> RunConfig:
    """Lower `tables.compression` to what the tables of a small data set can reach, even if ranks are 1."""
    most = config.tables.most_compression(_dense_table_configs(config, schema))
    if config.tables.format != "tt" or not 1 < most < (config.tables.compression or 1):
        return config
    return replace(config, tables=replace(config.tables, compression=most))


def keeps_all_dense(config: RunConfig, schema: Schema) -> bool:
    """Return whether no table becomes a TT table, though the config has that format."""
    tables = _dense_table_configs(config, schema)
    return config.tables.format == "tt" and bool(tables) and all(map(config.tables.reason_to_stay_dense, tables))


def _dense_table_configs(config: RunConfig, schema: Schema) -> list[EmbeddingBagConfig]:
    dim = config.model.embedding_dim
    return [
        EmbeddingBagConfig(name=name, num_embeddings=num_embeddings, embedding_dim=dim, feature_names=[name])
        for name, num_embeddings in (schema.sparse | schema.first).items()
    ]


def materialize_(model: nn.Module, device: torch.device) -> nn.Module:
    """Initialize a model on the meta device, in the order of its modules; only its dense tables stay on the meta device."""
    tables = {child for module in model.modules() if isinstance(module, EmbeddingBagCollection) for child in module.modules()}
    for module in model.modules():
        if module not in tables and any(parameter.is_meta for parameter in module.parameters(recurse=False)):
            module.to_empty(device=device, recurse=False)
            cast(Any, module).reset_parameters()
    return model


def require_fusible_tables(model: nn.Module) -> None:
    """Raise ValueError for a dense table that FBGEMM doesn't take."""
    collections = [module for module in model.modules() if isinstance(module, EmbeddingBagCollection)]
    for table in (table for collection in collections for table in collection.embedding_bag_configs()):
        if table.embedding_dim % 4:
            raise UserError(
                f"table {table.name!r} is dense and has {table.embedding_dim} columns: FBGEMM takes multiples of 4, so change "
                "model.embedding_dim"
            )


def fuse_dense_tables_(model: nn.Module, lr: float, device: torch.device) -> list[KeyedOptimizer]:
    """Replace every EmbeddingBagCollection by FBGEMM's fused tables, which row-wise Adagrad updates in the backward pass.

    Collections on the meta device are initialized as their configs say.

    Returns:
        Their optimizers, which hold state and need no `step`.
    """
    replacements: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        if isinstance(module, EmbeddingBagCollection):
            fused = FusedEmbeddingBagCollection(
                module.embedding_bag_configs(), RowWiseAdagrad, {"lr": lr}, module.is_weighted(), device
            )
            if any(weight.is_meta for weight in module.parameters()):
                weights = fused.state_dict()
                for table in module.embedding_bag_configs():  # in place: another copy may not fit
                    cast(Any, table).init_fn(weights[f"embedding_bags.{table.name}.weight"])
            else:
                fused.load_state_dict(module.state_dict())
            for weight in fused.parameters():
                weight.requires_grad_(False)  # updated in place by the kernel: no other optimizer may take it
            replacements[module] = fused
    replace_modules_(model, replacements)
    return [m.fused_optimizer() for m in replacements.values() if isinstance(m, FusedEmbeddingBagCollection)]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Build the torch optimizer of all parameters but those of fused tables."""
    groups = rank_param_groups(model, lr_cores=config.lr_cores, lr_ranks=config.lr_ranks, lr_dense=config.lr_dense)
    for group in list(groups):
        group["weight_decay"] = {"cores": config.weight_decay_cores, "dense": config.weight_decay_dense}.get(group["name"], 0.0)
        if group["name"] == "dense" and config.weight_decay_dense:
            biases = [parameter for parameter in group["params"] if parameter.dim() < 2]
            group["params"] = [parameter for parameter in group["params"] if parameter.dim() >= 2]
            groups.append({**group, "name": "biases", "weight_decay": 0.0, "params": biases})
    groups = [group for group in groups if group["params"]]
    if config.name != "adagrad":
        return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.name](groups, fused=True)
    on_cpu = all(parameter.device.type == "cpu" for group in groups for parameter in group["params"])
    return torch.optim.Adagrad(groups, eps=1e-8, fused=on_cpu or None)  # torch has no fused Adagrad for GPUs
