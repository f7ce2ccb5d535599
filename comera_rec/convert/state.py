"""Conversion of the state dicts of TorchRec models to those of their compressed forms."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from comera_rec.convert.budget import fit_tables_
from comera_rec.convert.compress import require_table_compression
from comera_rec.convert.folders import TensorReader
from comera_rec.convert.table_compression import TableCompression
from comera_rec.nn import TTEmbeddingBag

_TABLE = re.compile(r"(?P<collection>.*?)embedding_bags\.(?P<table>[^.]+)\.weight")


def compress_state(
    state: Mapping[str, Tensor], tables: TableCompression, *, importance: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return the state dict that a model has after `compress_`, with TT tables fitted to its dense tables.

    All TT tables and their hot rows share one budget, that of the shapes that `tables` gives them; ranks and widths are chosen to
    lower the weighted squared error most (`fit_tables_`). To use the result, build the model, compress it with the same `tables`,
    and call `load_state_dict`: modules take the ranks of the state dict.

    Args:
        state: a state dict with tables named as in EmbeddingBagCollections, `....embedding_bags.TABLE.weight`. All other entries
            are kept as they are, and so are tables that share memory with another tensor, which `compress_` leaves dense.
        tables: which tables, and how small.
        importance: [M] weights of the rows' squared errors by table name, see `row_importance`. Default: equal.

    Raises:
        ValueError: if there is no table, or none of `tables.min_rows` rows with an unshared weight; for a table of integers, or of
            numbers that are not finite; if the model was compressed already; if `importance` lacks a table or doesn't fit one.
    """
    require_table_compression(tables)
    dense = _tables(state)
    sharers = Counter(_address(value) for value in state.values() if type(value) in (Tensor, nn.Parameter))
    compressed = {key: value for key, value in state.items() if key not in dense}
    tables.require_tables([match["table"] for match in dense.values()])
    sizes = [
        EmbeddingBagConfig(name=match["table"], num_embeddings=len(state[key]), embedding_dim=state[key].shape[1])
        for key, match in dense.items()
    ]
    shared = [k for k, key in enumerate(dense) if sharers[_address(state[key])] > 1]
    configs = dict(zip(dense, tables.table_configs(sizes, dense=shared), strict=True))
    with_tt = {dense[key]["collection"] for key, table in configs.items() if table.is_tt}  # others are not replaced
    bags: dict[str, TTEmbeddingBag] = {}
    for key, table in configs.items():
        rows, columns, collection = table.num_embeddings, table.embedding_dim, dense[key]["collection"]
        if table.is_tt:
            bags[key] = TTEmbeddingBag(rows, columns, shape=table.tt_shape(), hot_rows=table.hot_rows, dtype=state[key].dtype)
        else:
            compressed[f"{collection}{'dense_bags.' * (collection in with_tt)}embedding_bags.{table.name}.weight"] = state[key]
    if not bags:
        raise ValueError(f"no table with an unshared weight has at least {tables.min_rows} rows: lower min_rows")
    weights = _row_weights(importance, {key: dense[key]["table"] for key in bags}, state)
    for key in bags:
        if not math.isfinite(torch.linalg.vector_norm(state[key], dtype=torch.float64)):
            raise ValueError(f"{key} holds numbers that are not finite: give the state dict of a model that has not diverged")
    budget = sum(parameter.numel() for bag in bags.values() for parameter in bag.parameters())
    fit_tables_(list(bags.values()), [state[key].detach() for key in bags], budget, weights)
    for key, bag in bags.items():
        prefix = f"{dense[key]['collection']}tt_bags.{dense[key]['table']}"
        compressed |= {f"{prefix}.{name}": value.detach() for name, value in bag.state_dict().items()}
    return compressed


def _tables(state: Mapping[str, Tensor]) -> dict[str, re.Match[str]]:
    """Return the tables of a state dict by key; raise ValueError if there are none, or if one can't be compressed."""
    tables = {key: match for key in state if (match := _TABLE.fullmatch(key)) and state[key].dim() == 2}
    if not tables:
        raise ValueError("the state dict holds no table (....embedding_bags.TABLE.weight): give that of a TorchRec model")
    for key, match in tables.items():
        if match["collection"].endswith("dense_bags."):
            raise ValueError(f"{key} is a dense table beside TT tables: give the state dict of a model before it was compressed")
        if not state[key].is_floating_point():
            raise ValueError(f"{key} holds {state[key].dtype}: give a table of floating point numbers")
        if type(state[key]) not in (Tensor, nn.Parameter):
            raise ValueError(f"{key} is a {type(state[key]).__name__}, spread over processes: save it with dcp, and use read_state")
    return tables


def _row_weights(
    importance: Mapping[str, Tensor] | None, names: Mapping[str, str], state: Mapping[str, Tensor]
) -> list[Tensor | None]:
    """Return the importance of tables, given by key and name; raise ValueError if one is missing or invalid."""
    if importance is None:
        return [None] * len(names)
    if missing := [name for name in names.values() if name not in importance]:
        raise ValueError(f"importance lacks {', '.join(missing)}: give it for all tables that are compressed, or for none")
    for key, name in names.items():
        weight, count = importance[name], len(state[key])
        if weight.shape != (count,):
            raise ValueError(f"importance of {name!r} has shape {tuple(weight.shape)}: give {count} numbers")
        if not (weight >= 0).logical_and(weight.isfinite()).all():
            raise ValueError(f"importance of {name!r} holds numbers that are not finite or below 0: give finite ones of at least 0")
    return [importance[name] for name in names.values()]


def _address(value: Tensor) -> tuple[int, int]:
    """Return a key that is equal for tensors that share memory."""
    return value.data_ptr(), value.numel()


def row_importance(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the importance of each table's rows: the sums of squared gradients that row-wise Adagrad keeps.

    Args:
        state: an optimizer's state dict as TorchRec's fused tables write it, sharded (`TABLE.momentum1` of
            `....embedding_bags.TABLE.weight`) or not (`momentum_1`); nested, or with names joined by dots as in a distributed
            checkpoint.

    Returns:
        [M] by table name; tables without such sums are left out.
    """
    importance: dict[str, Tensor] = {}
    for name, value in _flat(state):
        table = re.search(r"(?:^|\.)([^.]+)\.weight\.(?:.*\.)?momentum_?1$", name)
        if table and value.dim() == 1:
            importance[table[1]] = value
    return importance


def read_state(path: str | Path) -> dict[str, Tensor]:
    """Read the tensors of a state dict from a file of torch.save (memory-mapped) or a folder of a distributed checkpoint.

    If a file nests the state dict, as in {"model": ..., "epoch": 3}, only the mapping that contains tables is returned; without
    tables, everything is. Names of nested mappings are joined by dots.

    Raises:
        ValueError: for a path that is neither, or a file that is not a state dict of tensors, numbers and strings.
    """
    path = Path(path)
    if path.is_dir():
        if not (path / ".metadata").exists():
            raise ValueError(f"{path} holds no .metadata: give the folder that torch.distributed.checkpoint wrote")
        reader = TensorReader(path)
        try:
            state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in reader.tensors().items()}
            reader.read_into(state, no_dist=True)
        except Exception as error:  # whatever unpickling raises
            raise ValueError(f"{path} can't be read as a distributed checkpoint: {error}") from None
        return state
    if not path.exists():
        raise ValueError(f"{path} does not exist: give a file that torch.save wrote, or the folder of a distributed checkpoint")
    try:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # whatever unpickling raises
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} can't be read as a state dict ({reason}): give a file that torch.save wrote") from None
    if not isinstance(loaded, Mapping):
        raise ValueError(f"{path} holds a {type(loaded).__name__}: give a state dict")
    return dict(_flat(_table_mapping(loaded) or loaded))


def _table_mapping(state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the mapping that names tables, the outer one or one nested in it."""
    if any(isinstance(value, Tensor) and _TABLE.fullmatch(str(name)) for name, value in state.items()):
        return state
    nested = (_table_mapping(value) for value in state.values() if isinstance(value, Mapping))
    return next((mapping for mapping in nested if mapping is not None), None)


def _flat(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested mappings, with names joined by dots."""
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, Tensor):
            yield f"{prefix}{name}", value
