"""Replacement of the embedding tables and linear layers of any model by TT tables and layers."""

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from comera_rec.convert.budget import fit_tables_
from comera_rec.convert.export import configs_of, layers_of
from comera_rec.convert.table_compression import TableCompression
from comera_rec.nn import (
    FilterFn,
    LinearCompression,
    TTEmbedding,
    TTEmbeddingBag,
    TTTable,
    compressed_linears,
    keep_buffers_hooks_and_mode_,
    parameter_owners,
    replace_modules_,
)
from comera_rec.nn.linear_compression import adapter_reason, leave_fast_paths_
from comera_rec.nn.replacement import reason_to_stay_dense, require_no_optimizer, require_values
from comera_rec.nn.tt_module import std_of
from comera_rec.nn.tt_table import require_plain_rows
from comera_rec.recsys import TTEmbeddingBagCollection, TTEmbeddingCollection
from data_pipeline.errors import UserError
from data_pipeline.similarity import similarity_order

_COLLECTIONS = (EmbeddingBagCollection, EmbeddingCollection)
_INITS = ("random", "tt_svd")
_COORDINATES = 16  # by which similar rows are found
_LOGGER = logging.getLogger(__name__)


def compress_(
    model: nn.Module,
    *,
    tables: TableCompression | None = None,
    linears: LinearCompression | None = None,
    filter_fn: FilterFn | None = None,
    init: str = "random",
    importance: Mapping[str, Tensor] | None = None,
    row_order: Mapping[str, Tensor] | Literal["similarity"] | None = None,
) -> nn.Module:
    """Replace a model's embedding tables by TT tables, and its linear layers by TT layers, in place.

    Modules are found by their type, subclasses excluded, and keep their inputs and outputs:

    | module | becomes | takes and returns |
    |---|---|---|
    | `torchrec.EmbeddingBagCollection` | `TTEmbeddingBagCollection` | KeyedJaggedTensor -> KeyedTensor [B, sum of N] |
    | `torchrec.EmbeddingCollection` | `TTEmbeddingCollection` | KeyedJaggedTensor -> {feature: JaggedTensor [L_f, N]} |
    | `torch.nn.EmbeddingBag` | `TTEmbeddingBag` | ids [L] and offsets [B] -> [B, N] |
    | `torch.nn.Embedding` | `TTEmbedding` | ids [...] -> [..., N] |
    | `torch.nn.Linear` | `TTLinear` | [..., I] -> [..., O] |

    (B bags, N columns of a table, L ids, I and O features.)

    Give the whole model: ties to weights outside of what is given are lost. Compress before you shard the model, and build the
    optimizer afterwards, because TT modules have new parameters. Small tables of a collection keep theirs. Whatever is frozen stays
    frozen, and dtypes, devices, training modes, buffers and hooks are kept. TT tables of data type BF16 are of bfloat16, although
    TorchRec's weights for it are of float16.
    Linear layers that share a weight share cores afterwards.

    A table or layer stays dense if another module has its weight, such as an output layer tied to an embedding, or a list of Python
    has it, if the weight is computed from other parameters, if it is frozen and would start at random, or for options that a TT
    table lacks, such as `max_norm`. So do layers of
    `torch.nn.MultiheadAttention`, which reads weights of layers that it never calls; attention that calls its layers, such as
    BERT's in the transformers library, is compressed. What happens to each table and layer, and why, is logged at level INFO.

    Args:
        model: any module that contains unsharded tables or linear layers.
        tables: which tables become TT tables, and how small; None leaves all as they are. `compression` is that of all tables that
            `filter_fn` accepts, taken together, whichever modules they are in.
        linears: which linear layers become TT layers, and how small; None leaves all as they are.
        filter_fn: (module, fully qualified name) -> whether to consider a collection, an embedding layer outside of collections,
            or a linear layer; default all.
        init: "random", with the standard deviation of the weights that are replaced, or "tt_svd" to start from them. With a
            `compression`, ranks and widths of hot rows then go to the tables where they reduce the error most (`fit_tables_`).
        importance: for "tt_svd", [M] weights of the squared errors of tables' rows, by table name; see `row_importance`. Default:
            equal.
        row_order: by table name, [M] the row that each id gets, such as the positions of `comera_rec.similarity_order`; tables
            without one keep theirs. It is kept as an int32 buffer, which counts as part of the compression. "similarity", for
            "tt_svd", makes similar rows of the weights neighbors, in the tables where the fit gains more than those bytes cost.

    Raises:
        ValueError: if `tables` is given and no table becomes a TT table, or `linears` and no layer; the message says why. Also for
            a compression out of reach, for weights that have an optimizer in backward already and, with "tt_svd", for weights on
            the meta device or tables with numbers that are not finite; for an importance that lacks a table or doesn't fit one.
            The model is unchanged then.
        TypeError: if `tables` or `linears` is of another type.

    Returns:
        The model; or its replacement, if the model itself is one of the modules above.

    Example:
        >>> import torchrec
        >>> table = torchrec.EmbeddingBagConfig(name="products", num_embeddings=50_000, embedding_dim=16, feature_names=["seen"])
        >>> model = nn.Sequential(torchrec.EmbeddingBagCollection([table]))
        >>> compress_(model, tables=TableCompression(compression=100))[0].tt_bag("products").shape.ranks
        (8, 8)
        >>> batch = torchrec.KeyedJaggedTensor(keys=["seen"], values=torch.tensor([3, 49_999]), lengths=torch.tensor([2]))
        >>> model(batch).values().shape
        torch.Size([1, 16])
    """
    if tables is None and linears is None:
        raise UserError("neither tables nor linears is given: give tables=TableCompression(compression=100), linears=..., or both")
    if tables is not None and not isinstance(tables, TableCompression):
        raise TypeError(f"tables is {tables!r}: give a TableCompression, such as TableCompression(compression=100)")
    if linears is not None and not isinstance(linears, LinearCompression):
        raise TypeError(f"linears is {linears!r}: give a LinearCompression, such as LinearCompression(tt_ranks=16)")
    if init not in _INITS:
        raise UserError(f"init is {init!r}: choose one of {', '.join(map(repr, _INITS))}")
    if importance is not None and (init == "random" or tables is None):
        raise UserError("importance is given: it needs tables and init='tt_svd'")
    if row_order is not None and tables is None:
        raise UserError("row_order is given: it needs tables")
    if isinstance(row_order, str) and (row_order, init) != ("similarity", "tt_svd"):
        raise UserError(f"row_order is {row_order!r}: give orders by table, or 'similarity' with init='tt_svd'")
    if isinstance(model, DistributedDataParallel | DistributedModelParallel):
        raise UserError(f"the model is in a {type(model).__name__}, which has taken its parameters: compress it before")
    replacements: dict[nn.Module, nn.Module] = {}
    if tables is not None:
        tt_tables, reasons = _compressed_tables(model, tables, filter_fn, init, importance, row_order)
        if not tt_tables:
            raise _nothing_compressed("table", reasons, "lower min_rows, or leave tables out")
        replacements |= tt_tables
    if linears is not None:
        tt_layers, reasons = compressed_linears(model, linears, filter_fn=filter_fn, init=init)
        if not tt_layers:
            raise _nothing_compressed("linear layer", reasons, "lower min_features or the ranks, or leave linears out")
        replacements |= tt_layers
    model = replace_modules_(model, replacements)
    leave_fast_paths_(model)
    return model


def _nothing_compressed(kind: str, reasons: Mapping[str, str], remedy: str) -> UserError:
    """Return the error for a model without modules of a kind that become TT modules; `reasons` by the modules' names."""
    if not reasons:
        return UserError(
            f"no {kind} was compressed: the model has none that filter_fn accepts, or they are compressed or sharded already"
        )
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(repr(name))
    listed = [f"{', '.join(each[:3])}{f' and {len(each) - 3} more' * (len(each) > 3)}: {reason}" for reason, each in names.items()]
    return UserError(f"no {kind} was compressed ({'; '.join(listed)}); {remedy}")


@dataclass(frozen=True, eq=False)
class _Table:
    """A dense table: its layer, and the collection that it is in or None."""

    config: BaseEmbeddingConfig
    layer: Any
    collection: nn.Module | None


def _compressed_tables(
    model: nn.Module,
    compression: TableCompression,
    filter_fn: FilterFn | None,
    init: str,
    importance: Mapping[str, Tensor] | None,
    row_order: Mapping[str, Tensor] | str | None,
) -> tuple[dict[nn.Module, nn.Module], dict[str, str]]:
    """Make the TT modules that replace a model's collections and embedding layers.

    Returns:
        The TT modules, by those that they replace; and why the other tables stay dense, by name.
    """
    tables, reasons = _tables(model, filter_fn)
    if tables:
        compression.require_tables([table.config.name for table in tables])
    shared = _reasons_to_stay_dense(model, tables, init)
    for name, why in reasons.items():
        _LOGGER.info("%s: stays as it is: %s", name, why)
    dense = {k for k, table in enumerate(tables) if k in shared or compression.reason_to_stay_dense(table.config)}
    names = [table.config.name for k, table in enumerate(tables) if k not in dense]
    for name in (*(importance or ()), *(() if isinstance(row_order, str) else row_order or ())):
        if names.count(name) > 1:
            raise UserError(f"{names.count(name)} tables are named {name!r}: rename them, or compress one at a time (filter_fn)")
    orders = _row_orders(row_order, tables, dense, compression, importance)
    while True:
        sizes = {table.layer: _order_numbers(table) for table in tables if table.layer in orders}
        try:
            configs = compression.table_configs([table.config for table in tables], dense=shared, others=sum(sizes.values()))
            break
        except UserError:
            if row_order != "similarity" or not orders:
                raise
            del orders[max(sizes, key=lambda layer: sizes[layer])]  # orders were chosen for one table at a time
    for k, config in enumerate(configs):
        reason = shared.get(k) or compression.reason_to_stay_dense(tables[k].config)
        if reason:
            reasons[config.name] = reason
        if not reason and init == "tt_svd":
            _require_finite(tables[k].layer.weight.detach(), config.name)
        what = f"stays dense: {reason}" if reason else f"ranks {config.tt_shape().ranks}"
        _LOGGER.info("%s: %d x %d, %s", config.name, config.num_embeddings, config.embedding_dim, what)
    replacements: dict[nn.Module, nn.Module] = {}
    replaced: list[_Replaced] = []
    for module in dict.fromkeys(table.collection or table.layer for table in tables):
        inside = [config for table, config in zip(tables, configs, strict=True) if module in (table.collection, table.layer)]
        if any(config.is_tt for config in inside):
            make = _collection if isinstance(module, _COLLECTIONS) else _layer
            replacements[module] = make(module, inside, replaced)
    for _, table, layer in replaced:
        if layer in orders:
            table.set_row_order_(orders[layer])
    if init == "tt_svd":
        weights = [_row_weights(importance, name, layer.num_embeddings) for name, _, layer in replaced]
        _fit_([table for _, table, _ in replaced], [layer.weight.detach() for *_, layer in replaced], compression, weights)
    return replacements, reasons


def _row_orders(
    row_order: Mapping[str, Tensor] | str | None,
    tables: Sequence[_Table],
    dense: Collection[int],
    compression: TableCompression,
    importance: Mapping[str, Tensor] | None,
) -> dict[nn.Module, Tensor]:
    """Return the row orders of the tables that become TT tables, which those numbered `dense` do not, by their layers."""
    if row_order is None:
        return {}
    compressed = [table for k, table in enumerate(tables) if k not in dense]
    if not isinstance(row_order, str):
        if unknown := row_order.keys() - {table.config.name for table in tables}:
            raise UserError(f"row_order names {min(unknown)!r}, which is no table: leave it out")
        return {table.layer: row_order[name] for table in compressed if (name := table.config.name) in row_order}
    orders = {}
    for table in compressed:
        weight, config = table.layer.weight.detach(), table.config
        _require_finite(weight, config.name)
        weights = _row_weights(importance, config.name, len(weight))
        order = similar_rows(weight, weights)
        errors = []
        for numbers, rows in ((0, None), (_order_numbers(table), order)):
            try:
                [sized] = compression.table_configs([config], others=numbers)
            except UserError:  # out of reach
                errors.append(math.inf)
                continue
            fitted = TTEmbeddingBag(*weight.shape, shape=sized.tt_shape(), hot_rows=sized.hot_rows, row_order=rows).to(weight)
            _fit_([fitted], [weight], compression, [weights])
            squares = (fitted.dense_matrix().detach() - weight).double().square().sum(1)
            errors.append(float(squares.sum() if weights is None else squares @ weights.double()))
        if errors[1] < errors[0]:
            orders[table.layer] = order
    return orders


def _order_numbers(table: _Table) -> int:
    """Return as how many of a table's numbers its row order counts."""
    return 4 * table.layer.num_embeddings // table.layer.weight.element_size()


def similar_rows(weight: Tensor, importance: Tensor | None = None) -> Tensor:
    """Return the row that each id gets if similar rows of a trained table become neighbors: int64 [M], a permutation.

    Rows are compared by their leading principal coordinates, in bands of importance as `comera_rec.similarity_order` has them.

    Args:
        weight: [M, N], the rows of ids.
        importance: [M], see `fit_tables_`; default the rows' squared lengths, because rows that are often read have moved most.
    """
    rows = weight.detach().float()
    importance = rows.square().sum(1) if importance is None else importance.to(rows)
    frequent = importance.argsort(descending=True, stable=True)
    axes = torch.linalg.eigh(rows.mT @ (importance[:, None] * rows))[1].flip(1)[:, :_COORDINATES]
    coordinates = (rows @ axes)[frequent]
    vectors = torch.cat([coordinates, coordinates.new_zeros(len(rows), 1)], dim=1)
    order = torch.from_numpy(similarity_order(vectors.numpy(force=True)))
    return torch.empty_like(order).index_put_((frequent.cpu()[order],), torch.arange(len(order)))


def _tables(model: nn.Module, filter_fn: FilterFn | None) -> tuple[list[_Table], dict[str, str]]:
    """Return the tables of collections and of embedding layers, in the order of the model's modules.

    Modules of derived classes stay as they are, because they may do something else: also return why, by their names.
    """
    kinds, tables, reasons = (*_COLLECTIONS, nn.Embedding, nn.EmbeddingBag), list[_Table](), dict[str, str]()
    collections = (*_COLLECTIONS, TTEmbeddingBagCollection, TTEmbeddingCollection)
    parents = [module for module in model.modules() if isinstance(module, collections)]
    inside = {child for parent in parents for child in parent.modules() if child is not parent}
    for name, module in model.named_modules():
        kind = next((kind for kind in kinds if isinstance(module, kind)), None)
        if kind is None or (kind is type(module) and module in inside) or not (filter_fn is None or filter_fn(module, name)):
            continue
        if kind is not type(module):
            reasons[name or "the model"] = f"it is a {type(module).__name__}, not the {kind.__name__} that it is derived from"
        elif isinstance(module, _COLLECTIONS):
            tables += (_Table(config, layers_of(module)[config.name], module) for config in configs_of(module))
        else:
            sizes = {"num_embeddings": module.num_embeddings, "embedding_dim": module.embedding_dim}
            tables.append(_Table(EmbeddingBagConfig(name=name or "the model", feature_names=["ids"], **sizes), module, None))
    return tables, reasons


def _reasons_to_stay_dense(model: nn.Module, tables: Collection[_Table], init: str) -> dict[int, str]:
    """Return why tables can't become TT tables, by position."""
    whole = {table.collection for table in tables if table.collection is not None}
    owners, paths = parameter_owners(model, whole), dict[nn.Module, list[str]]()
    for name, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(name)
    reasons = {
        k: adapter_reason(model, paths[table.layer][0]) or _reason_to_stay_dense(table, owners, paths, init)
        for k, table in enumerate(tables)
    }
    return {k: reason for k, reason in reasons.items() if reason}


def _reason_to_stay_dense(
    table: _Table, owners: Mapping[Tensor, list[tuple[str, nn.Module]]], paths: Mapping[nn.Module, list[str]], init: str
) -> str | None:
    if reason := reason_to_stay_dense(table.layer, owners, init=init, is_called=table.collection is None):
        return reason
    if table.collection is not None:
        prefixes = tuple(f"{path}." if path else "" for path in paths[table.collection])
        if elsewhere := [path for path in paths[table.layer] if not path.startswith(prefixes)]:
            return f"its weight is also that of {elsewhere[0]!r}"
    try:
        require_plain_rows(table.layer)
    except ValueError as error:
        return str(error)
    return None


_Replaced = tuple[str, TTTable, nn.Embedding | nn.EmbeddingBag]
"""Name of a table, the TT table, and the layer that it replaces."""


def _collection(module: Any, configs: list[Any], replaced: list[_Replaced]) -> nn.Module:
    """Make the TT collection that replaces a collection; add its TT tables to `replaced`."""
    device = next(module.parameters()).device  # where the tables are now; module.device is where they were made
    compressed: TTEmbeddingCollection | TTEmbeddingBagCollection
    if isinstance(module, EmbeddingCollection):
        compressed = TTEmbeddingCollection(configs, device, module.need_indices(), module.use_gather_select())
        collection = compressed.tables
    else:
        compressed = collection = TTEmbeddingBagCollection(configs, module.is_weighted(), device)
    keep_buffers_hooks_and_mode_(compressed, module)
    layers = layers_of(module)
    for name, bag in collection.embedding_bags.items():
        if isinstance(bag, TTEmbeddingBag):
            if (std := std_of(layers[name].weight)) is not None:  # the config says how they were drawn
                bag.std = std
                bag.reset_parameters()
            if (bag.core_0.dtype, layers[name].weight.dtype) != (torch.bfloat16, torch.float16):  # which TorchRec makes for BF16
                bag.to(layers[name].weight.dtype)
            _take_place_(bag, layers[name], name, replaced)
        else:
            layers_of(collection.dense_bags)[name] = layers[name]
    return compressed


def _layer(layer: Any, configs: list[Any], replaced: list[_Replaced]) -> nn.Module:
    """Make the TT table that replaces a layer; add it to `replaced`."""
    (config,) = configs
    kind: type[TTTable] = TTEmbedding if isinstance(layer, nn.Embedding) else TTEmbeddingBag
    table = kind.like(layer, shape=config.tt_shape(), hot_rows=config.hot_rows, name=config.name)
    return _take_place_(table, layer, config.name, replaced)


def _take_place_(table: TTTable, layer: nn.Embedding | nn.EmbeddingBag, name: str, replaced: list[_Replaced]) -> TTTable:
    require_no_optimizer(layer.weight, name)
    keep_buffers_hooks_and_mode_(table.requires_grad_(layer.weight.requires_grad), layer)
    replaced.append((name, table, layer))
    return table


def _fit_(tables: list[TTTable], weights: list[Tensor], compression: TableCompression, importance: list[Tensor | None]) -> None:
    """Let TT tables start from the rows of those that they replace, at the size that they have together or, if given, ranks."""
    size = sum(parameter.numel() for table in tables for parameter in table.parameters())
    fit_tables_(tables, weights, size if compression.shares_size else None, importance)


def _require_finite(weight: Tensor, name: str) -> None:
    """Raise ValueError for a weight without values, or with some that are not finite."""
    require_values(weight, name)
    if not math.isfinite(torch.linalg.vector_norm(weight, dtype=torch.float64)):
        raise UserError(f"{name!r} holds numbers that are not finite: give a model that has not diverged")


def _row_weights(importance: Mapping[str, Tensor] | None, name: str, rows: int) -> Tensor | None:
    """Return the importance of a table's rows; raise ValueError if it is missing or invalid."""
    if importance is None:
        return None
    if name not in importance:
        raise UserError(f"importance lacks {name!r}: give it for all tables that are compressed, or for none")
    weight = importance[name]
    if weight.shape != (rows,) or not (weight >= 0).logical_and(weight.isfinite()).all():
        raise UserError(f"importance of {name!r} has shape {tuple(weight.shape)}: give {rows} finite numbers of at least 0")
    return weight
