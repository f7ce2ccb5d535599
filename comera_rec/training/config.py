"""Configs of runs: a TOML file and `section.key=value` overrides, validated into frozen dataclasses."""

import dataclasses
import datetime
import difflib
import json
import math
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, TypeAdapter, ValidationError

from comera_rec.convert import LinearCompression, TableCompression
from comera_rec.rank import RankConfig
from data_pipeline.errors import UserError


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where batches come from.

    Attributes:
        path: folder written by `comera preprocess`.
        batch_size: rows in a training batch.
        eval_batch_size: rows in an evaluation batch.
        shuffle_rows: rows that are permuted at once, in the buffers of all processes together.
        prefetch: batches read ahead.
    """

    path: str
    batch_size: PositiveInt = 2048
    eval_batch_size: PositiveInt = 2048
    shuffle_rows: PositiveInt = 131_072
    prefetch: PositiveInt = 4


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Kind and sizes of the model.

    Attributes:
        architecture: "dlrm", or "dcn" for DLRM-DCNv2, with a cross network in place of products of pairs.
        embedding_dim: columns of every table.
        dense_arch: outputs of the bottom MLP's hidden layers; a last layer of `embedding_dim` outputs is added.
        over_arch: outputs of the top MLP's hidden layers; a last layer of one output per label is added.
        cross_layers, cross_rank: number and rank of the cross network's layers.
    """

    architecture: Literal["dlrm", "dcn"] = "dlrm"
    embedding_dim: PositiveInt = 16
    dense_arch: tuple[PositiveInt, ...] = (256, 128)
    over_arch: tuple[PositiveInt, ...] = (256, 128)
    cross_layers: PositiveInt = 3
    cross_rank: PositiveInt = 64

    def __post_init__(self) -> None:
        if not self.over_arch:
            raise UserError(f"model.over_arch is empty: give at least one layer size, as {self.architecture} needs")


@dataclass(frozen=True, kw_only=True)
class TablesConfig(TableCompression):
    """The form of tables: the fields of `TableCompression`, and whether to use them.

    Attributes:
        format: "tt" for large tables as TT tables, "dense" for all dense.
        hot_rows: as in `TableCompression`; "auto" here, because the ids of a preprocessed data set are ordered by frequency. It
            is 0 where the most frequent twentieth of the values has less than half of the occurrences, in the mean over TT tables
            (in order of similarity; others count as 1). Tables of hashed ids, which have no order, get no hot rows.
        start: "random" values, or the "vectors" that `comera preprocess --order similarity` keeps, for dense and TT tables; a TT
            table that can't represent them starts at random. They suit lower learning rates.
    """

    format: Literal["tt", "dense"] = "tt"
    hot_rows: float | Literal["auto"] = "auto"
    start: Literal["random", "vectors"] = "random"


@dataclass(frozen=True, kw_only=True)
class LinearsConfig(LinearCompression):
    """The form of MLP layers: the fields of `LinearCompression`, and whether to use them.

    Attributes:
        format: "tt" or "dense".
    """

    format: Literal["tt", "dense"] = "tt"


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Adam, AdamW or Adagrad for everything that has a gradient; dense tables always use TorchRec's fused row-wise Adagrad.

    Attributes:
        name: "adam", "adamw" or "adagrad". On CPU, Adam's moments of TT tables change only for slices that a batch uses, as with
            `torch.optim.SparseAdam`, except in what row-wise sharding replicates and where updates in backward are off.
        lr_dense: learning rate of MLP weights and biases.
        lr_cores: learning rate of TT cores.
        lr_ranks: learning rate of the rank parameters D_k, which start at 1; with Adam, about the most that a step changes them.
        lr_tables: learning rate of dense tables.
        warmup_steps: steps over which all rates rise from zero.
        decay: share of a run's steps, at its end, over which all rates fall to zero.
        weight_decay_dense: factor of MLP weights (not biases); weight times factor is added to the gradient or, with AdamW, weight
            times factor times learning rate is subtracted from the weight.
        weight_decay_cores: the same for TT cores; if they are updated in backward, only for the slices that a batch uses.
    """

    name: Literal["adam", "adamw", "adagrad"] = "adam"
    lr_dense: PositiveFloat = 0.002
    lr_cores: PositiveFloat = 0.003
    lr_ranks: PositiveFloat = 0.0003
    lr_tables: PositiveFloat = 0.05
    warmup_steps: NonNegativeInt = 0
    decay: Annotated[float, Field(ge=0, le=1)] = 0.0
    weight_decay_dense: NonNegativeFloat = 0.0
    weight_decay_cores: NonNegativeFloat = 0.0


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How long to train, and what to log, evaluate and save on the way.

    Attributes:
        steps: optimizer steps; None to use `epochs`.
        epochs: passes over the training split.
        log_every: steps between log lines, also between checks that the loss is finite.
        eval_every: steps between evaluations on the validation split; 0 for none before the end.
        checkpoint_every: steps between checkpoints; 0 for none before the end.
        keep_checkpoints: number of latest checkpoints to keep.
        keep_best: also keep the checkpoint of the lowest validation NE, and use it for the result, `evaluate` and `export`. With
            [ranks] only evaluations at the final size count.
        patience: evaluations in a row without a lower validation NE, counted likewise, that end training; 0 to take all steps.
        device: "cpu", "cuda", or "auto" for a GPU if there is one.
        precision: "float32", or "bfloat16" for matrix products in training; parameters, lookups and the loss stay float32.
        capture: on a GPU, whether steps are captured in a CUDA graph once their shapes have settled; "auto" where they can be.
        teacher: folder of a trained run on the same data, whose predictions take the place of the labels in the loss (distillation,
            Hinton et al., arXiv 1503.02531); every process keeps that whole model. For data on which that model predicts better.
        task_weights: weight of each label's loss in their mean, in the order of the data set's labels; empty for equal weights.
    """

    steps: PositiveInt | None = None
    epochs: PositiveFloat = 1.0
    log_every: PositiveInt = 20
    eval_every: NonNegativeInt = 0
    checkpoint_every: NonNegativeInt = 5000
    keep_checkpoints: PositiveInt = 2
    keep_best: bool = False
    patience: NonNegativeInt = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["float32", "bfloat16"] = "float32"
    capture: bool | Literal["auto"] = "auto"
    teacher: str | None = None
    task_weights: tuple[Annotated[float, Field(gt=0, lt=math.inf)], ...] = ()

    def __post_init__(self) -> None:
        for name in ("keep_best", "patience"):
            if getattr(self, name) and not self.eval_every:
                raise UserError(f"training.{name} is {getattr(self, name)} but nothing is evaluated: set training.eval_every")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run.

    Attributes:
        output: folder of the run.
        seed: seed of initialization and shuffling.
        ranks: rank adaptation; None keeps the initial ranks.
    """

    output: str
    data: DataConfig
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    tables: TablesConfig = field(default_factory=TablesConfig)
    linears: LinearsConfig = field(default_factory=LinearsConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    ranks: RankConfig | None = None
    training: TrainingConfig = field(default_factory=TrainingConfig)

    def __post_init__(self) -> None:
        if not self.output.strip():
            raise UserError("output is empty: give the run's folder")

    def to_dict(self) -> dict[str, Any]:
        """Return the config as plain numbers, strings, lists and sections."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return plain


Settings = TypeVar("Settings")


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run's config; see `load_settings`."""
    return load_settings(RunConfig, path, overrides)


def load_settings(schema: type[Settings], path: str | Path | None, overrides: Sequence[str] = ()) -> Settings:
    """Read settings from a TOML (or, as written into a run's folder, JSON) file.

    Args:
        schema: the dataclass that the file is validated into; its fields are plain values or such dataclasses.
        path: the file; None for overrides alone.
        overrides: `section.key=value` or `key=value`; values are TOML (true, 3, 0.1, [1, 2], "x"), bare words are strings, and
            `none` removes the key, so that its default applies.

    Raises:
        ValueError: one line, for unknown keys (with the nearest known one), values of the wrong type, or a file that is not TOML.
        OSError: if the file can't be read.
    """
    raw: dict[str, Any] = {}
    if path is not None:
        try:
            text = Path(path).read_text("utf-8-sig")
            raw = json.loads(text) if str(path).endswith(".json") else tomllib.loads(text)
        except ValueError as error:
            raise UserError(f"{path} can't be parsed: {error}") from None
    for override in overrides:
        _apply(raw, override)
    return _parse(schema, raw)


def parse_config(raw: dict[str, Any]) -> RunConfig:
    """Validate nested plain values into a config; errors as in `load_settings`."""
    return _parse(RunConfig, raw)


def _parse(schema: type[Settings], raw: dict[str, Any]) -> Settings:
    _reject_unknown(raw, schema, "")
    try:
        # Through JSON, whose strict rules accept a list as a tuple, but neither true nor "3" as a number.
        return TypeAdapter(schema).validate_json(json.dumps(_required_sections(schema) | raw, default=str), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "missing":
            raise UserError(f"config: {key} is missing: set it in the file, or as {key}=VALUE on the command line") from None
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] != "value_error":  # errors of the dataclasses name the value
            message += f", not {first['input']!r}"
        raise UserError(f"config: {key}: {message}" if key and not message.startswith(key) else f"config: {message}") from None


def _required_sections(schema: type) -> dict[str, dict[str, Any]]:
    """Return an empty section for each required one, so that errors name the key that it lacks."""
    types = get_type_hints(schema)
    required = [f for f in dataclasses.fields(schema) if f.default is f.default_factory is dataclasses.MISSING]
    return {f.name: {} for f in required if dataclasses.is_dataclass(types[f.name])}


def _apply(raw: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise UserError(f"override {override!r} is not of the form section.key=value")
    *sections, name = key.split(".")
    for section in sections:
        raw = raw.setdefault(section, {})
        if not isinstance(raw, dict):
            raise UserError(f"override {override!r}: {section} is a value, not a section")
    if text == "none":
        raw.pop(name, None)
        return
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    raw[name] = text if isinstance(value, datetime.date | datetime.time) else value  # no key is a time, but folders have such names


def _section(kind: Any) -> type | None:
    """Return the dataclass of a field that is one, or that may be one."""
    return next((part for part in (kind, *get_args(kind)) if isinstance(part, type) and dataclasses.is_dataclass(part)), None)


def _leaves(schema: type, prefix: str) -> Iterator[str]:
    """Yield the full names of all keys."""
    for name, kind in get_type_hints(schema).items():
        section = _section(kind)
        yield from [prefix + name] if section is None else _leaves(section, f"{prefix}{name}.")


def _reject_unknown(raw: dict[str, Any], schema: type, prefix: str) -> None:
    types = get_type_hints(schema)
    known = [f.name for f in dataclasses.fields(schema)]
    for key, value in raw.items():
        if key not in known:
            near = [name for name in known if name.startswith(key)] or difflib.get_close_matches(key, known, n=1)
            near = [prefix + name for name in near] or [name for name in _leaves(schema, prefix) if name.endswith(f".{key}")]
            hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
            raise UserError(f"config: unknown key {prefix}{key}; {hint}")
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"config: {prefix}{key} is {value}: give a finite number")
        section = _section(types[key])
        if section is not None and isinstance(value, dict):
            _reject_unknown(value, section, f"{prefix}{key}.")
