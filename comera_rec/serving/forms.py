"""Copies of models whose tables and TT layers have the form used for serving.

B batch size, K keys of a batch, V ids, N embedding dimension.
"""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection, JaggedTensor, KeyedJaggedTensor, KeyedTensor, PoolingType
from torchrec.models.dlrm import InteractionArch
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.modules.mc_modules import ManagedCollisionCollection, MCHManagedCollisionModule

from comera_rec.convert.export import configs_of, layers_of, require_floats
from comera_rec.nn import TTEmbedding, TTEmbeddingBag, TTLinear, TTModule, TTTable, keep_buffers_hooks_and_mode_
from comera_rec.ops.native import ops
from comera_rec.ops.served_bags import DTYPES, ServedTable, Slab
from comera_rec.recsys import TTEmbeddingBagCollection, TTEmbeddingCollection
from comera_rec.recsys.dlrm import PairwiseInteraction
from comera_rec.serving.decompositions import permuted
from comera_rec.serving.lookups import FastTables, PortableTables, ServedTables
from comera_rec.tt import contract, first_rows
from data_pipeline.errors import UserError

FORMS: dict[str, type[PortableTables | FastTables]] = {"portable": PortableTables, "fast": FastTables}
COLLECTIONS = (
    TTEmbeddingBagCollection, TTEmbeddingCollection, EmbeddingBagCollection, FusedEmbeddingBagCollection, EmbeddingCollection,
)  # fmt: skip
_SIZES = ("num_embeddings", "embedding_dim", "in_features", "out_features")  # what models read of modules
_WORTH = 2.0  # two products must read this many times fewer numbers to be worth one more call
_WIDE = 0.75  # share of the columns: rows of wider slabs are formed in advance, because adding them would read about as much
Tables = Callable[[Sequence[ServedTable]], ServedTables]
Called = list[tuple[KeyedJaggedTensor, nn.Module]]


def serving_copy(model: nn.Module, arguments: Mapping[str, Any], form: str, dtype: str) -> tuple[nn.Module, Called]:
    """Copy a model to the CPU with its tables, TorchRec's dense ones included, and its TT layers in serving form.

    Args:
        model: any module; left as it is.
        arguments: of `forward`; they show which keys each collection is called with.
        form, dtype: as for `comera_rec.export`.

    Returns:
        The copy, and what each collection was called with.
    """
    tables = partial(FORMS[form], dtype=DTYPES[dtype])
    copied = _replaced(copy.deepcopy(model).cpu().eval(), partial(_replacement, tables=tables, is_fast=form == "fast"), {})
    called: Called = []

    def see(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        called.extend((each, module) for each in (*inputs, *named.values()) if isinstance(each, KeyedJaggedTensor))

    collections = [module for module in copied.modules() if isinstance(module, COLLECTIONS)]
    hooks = [module.register_forward_pre_hook(see, with_kwargs=True) for module in collections]
    try:
        copied(**arguments)
    except AttributeError as error:
        raise UserError(f"{error}: what is exported has no cores or weights of TT modules, so forward can't read them") from error
    for hook in hooks:
        hook.remove()
    keys = {module: list(features.keys()) for features, module in called}
    return _replaced(copied, lambda module: _collection(module, keys[module], tables) if module in keys else None, {}), called


def id_limits(features: KeyedJaggedTensor, called: Called) -> dict[str, int | None]:
    """Return the number of ids of each key of an input, from the collections called with it; None where none refuses any."""
    limits: dict[str, int | None] = dict.fromkeys(features.keys())
    for given, module in called:
        for config in configs_of(module) if given is features and not _replaces_bad_ids(module) else ():
            for name in config.feature_names:
                limits[name] = min(limits[name] or config.num_embeddings, config.num_embeddings)
    return limits


def _replaced(
    module: nn.Module, replacement: Callable[[nn.Module], nn.Module | None], done: dict[nn.Module, nn.Module]
) -> nn.Module:
    """Replace modules in place wherever they are shared; those inside a module with a replacement stay."""
    if module not in done:
        replaced = replacement(module)
        done[module] = replaced or module
        if replaced not in (None, module):
            _require_own_forward(module)
            keep_buffers_hooks_and_mode_(done[module], module)
            for name in _SIZES:
                if hasattr(module, name):
                    setattr(done[module], name, getattr(module, name))
        if replaced is None:
            for name, child in module._modules.items():
                if child is not None:
                    module._modules[name] = _replaced(child, replacement, done)
    return done[module]


def _require_own_forward(module: nn.Module) -> None:
    """Raise ValueError for a module whose serving form would leave out something that calls of the module do."""
    kind = type(module).__name__
    owner = next(each for each in type(module).__mro__ if "forward" in vars(each)).__module__.partition(".")[0]
    if "forward" in vars(module) or owner not in ("comera_rec", "torchrec"):
        raise UserError(f"a {kind} has a forward of its own, which its serving form would lack: put it into a module around it")
    uncalled = (TTModule, nn.ModuleDict, nn.ModuleList)
    parts = [each for each in module.modules() if each is not module and not isinstance(each, uncalled)]
    if any(each._forward_hooks or each._forward_pre_hooks for each in parts):
        raise UserError(f"a part of a {kind} has hooks, which its serving form would lack: register them on the {kind}")


def _replacement(module: nn.Module, tables: Tables, is_fast: bool) -> nn.Module | None:
    """Return the serving form of a module that isn't a collection."""
    if isinstance(module, COLLECTIONS):
        return module  # later, once its keys are known
    if isinstance(module, TTModule) and module.core_0.dtype != torch.float32:
        kind = type(module).__name__
        raise UserError(f"a {kind} is {module.core_0.dtype}, but served ones are float32: give model.float(), or a copy of it")
    if isinstance(module, TTLinear):
        return serving_layer(module)
    if isinstance(module, TTEmbedding):
        return _Rows(tables([served_table(module)]), module.padding_idx)
    if isinstance(module, TTEmbeddingBag) and module.mode != "max":
        return _Bags(tables([served_table(module, mean=module.mode == "mean")]), module.include_last_offset)
    if isinstance(module, TTModule):
        return module.to_dense()
    if isinstance(module, InteractionArch) and is_fast and module.F > 0:
        return _FastInteraction()
    if isinstance(module, PairwiseInteraction):
        return InteractionArch(module.F)
    if isinstance(module, ManagedCollisionCollection):
        return _Collisions(module)
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:  # else calls would change the weight
        with torch.no_grad():
            torch.embedding_renorm_(module.weight, torch.arange(len(module.weight)), module.max_norm, module.norm_type)
        module.max_norm = None
    return None


class _Lookup(NamedTuple):
    """A name of what a collection returns, and the table and feature that it comes from."""

    name: str
    table: ServedTable
    feature: str


def _collection(module: nn.Module, keys: list[str], tables: Tables) -> nn.Module:
    """Return the serving form of a collection that is called with the given keys."""
    made: Any = module
    configs, layers, is_pooled = configs_of(module), layers_of(module), hasattr(made, "is_weighted")
    lookups = []
    for config, names in zip(configs, get_embedding_names_by_table(configs), strict=True):
        layer = layers[config.name]
        weights = layer if isinstance(layer, TTTable) else layer.weight
        table = served_table(weights, mean=is_pooled and config.pooling == PoolingType.MEAN)
        lookups += [_Lookup(name, table, feature) for name, feature in zip(names, config.feature_names, strict=True)]
    if is_pooled:
        served: _Served = _BagCollection(keys, lookups, tables, is_weighted=made.is_weighted())
    else:
        served = _RowCollection(keys, lookups, tables, need_indices=made.need_indices())
    for group in served.groups:
        group.replaces_bad_ids = _replaces_bad_ids(made)
    return served


def _replaces_bad_ids(collection: Any) -> bool:
    return hasattr(collection, "bounds_check") and collection.bounds_check.mode != "fatal"


class _Served(nn.Module):
    """A collection in serving form: lookups of one dimension form a group."""

    def __init__(self, keys: list[str], lookups: Sequence[_Lookup], tables: Tables) -> None:
        super().__init__()
        self.keys, self.names = keys, [lookup.name for lookup in lookups]
        self.widths = [lookup.table.columns for lookup in lookups]
        positions = [keys.index(lookup.feature) for lookup in lookups]
        by_key = sorted(range(len(lookups)), key=positions.__getitem__)
        self.numbers = [[n for n in by_key if self.widths[n] == width] for width in dict.fromkeys(self.widths)]
        self.orders = [[positions[n] for n in numbers] for numbers in self.numbers]
        self.groups: Any = nn.ModuleList(tables([lookups[n].table for n in numbers]) for numbers in self.numbers)

    def inputs(self, features: KeyedJaggedTensor, is_weighted: bool) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Yield values, lengths and weights of the features of each group."""
        if list(features.keys()) != self.keys:
            raise UserError(f"a collection is called with keys {list(features.keys())}, with the sample batch {self.keys}")
        values, lengths = features.values().long(), features.lengths().long()
        weights = features.weights() if is_weighted else None
        lengths_KB = lengths.view(len(self.keys), lengths.shape[0] // len(self.keys))
        for order in self.orders:
            if order == list(range(len(self.keys))):
                yield values, lengths, weights
            else:
                chosen_KB, ids, ids_weights = permuted(torch.tensor(order), lengths_KB, values, weights)
                yield ids, chosen_KB.flatten(), ids_weights

    def by_name(self, parts: Iterable[Any]) -> dict[str, Any]:
        """Return what groups yield for their features, in the order of the collection's names."""
        ordered = dict(zip(itertools.chain.from_iterable(self.numbers), parts, strict=True))
        return {name: ordered[n] for n, name in enumerate(self.names)}


class _BagCollection(_Served):
    """KeyedJaggedTensor -> KeyedTensor [B, sum of N]."""

    def __init__(self, *parts: Any, is_weighted: bool) -> None:
        super().__init__(*parts)
        self.is_weighted = is_weighted

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        given = self.inputs(features, self.is_weighted)
        bags = [group(*tensors) for group, tensors in zip(self.groups, given, strict=True)]  # [B, K, N]
        if self.numbers == [list(range(len(self.names)))]:
            return KeyedTensor(self.names, self.widths, bags[0].flatten(1))
        parts = self.by_name(itertools.chain.from_iterable(each.unbind(1) for each in bags))
        return KeyedTensor(self.names, self.widths, torch.cat(list(parts.values()), dim=1))


class _RowCollection(_Served):
    """KeyedJaggedTensor -> a JaggedTensor [V, N] for each feature."""

    def __init__(self, *parts: Any, need_indices: bool) -> None:
        super().__init__(*parts)
        self.need_indices = need_indices

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        found = []
        for group, order, (values, lengths, _) in zip(self.groups, self.orders, self.inputs(features, False), strict=True):
            rows, lengths_KB = group.rows(values, lengths), lengths.view(len(order), lengths.shape[0] // len(order))
            counts = lengths_KB.sum(1)
            for k in range(len(order)):
                index = torch.arange(values.shape[0])
                if len(order) > 1:
                    index = counts[:k].sum() + torch.arange(counts[k].item())
                ids = values[index] if self.need_indices else None
                found.append(JaggedTensor(rows[index], lengths=lengths_KB[k], weights=ids))
        return self.by_name(found)


class _Rows(nn.Module):
    """A `TTEmbedding`."""

    num_embeddings: int

    def __init__(self, tables: ServedTables, padding_idx: int | None) -> None:
        super().__init__()
        self.tables, self.padding_idx = tables, padding_idx

    def forward(self, input: Tensor) -> Tensor:
        ids = input.flatten().long()
        rows = self.tables.rows(ids, torch.full((1,), ids.shape[0])).unflatten(0, input.shape)
        return rows if self.padding_idx is None else rows.masked_fill((input == self.padding_idx).unsqueeze(-1), 0)

    def dense_matrix(self) -> Tensor:
        return self(torch.arange(self.num_embeddings))

    def logits(self, input: Tensor) -> Tensor:
        return F.linear(input, self.dense_matrix())


class _Bags(nn.Module):
    """A `TTEmbeddingBag`."""

    def __init__(self, tables: ServedTables, include_last_offset: bool) -> None:
        super().__init__()
        self.tables, self.include_last_offset = tables, include_last_offset

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        if offsets is None:
            lengths = torch.full(input.shape[:1], input.shape[1])
        else:
            ends = offsets if self.include_last_offset else torch.cat([offsets, offsets.new_full((1,), input.shape[0])])
            lengths = ends.diff().long()
        weights = None if per_sample_weights is None else per_sample_weights.flatten()
        bags: Tensor = self.tables(input.flatten().long(), lengths, weights)
        return bags.squeeze(1)


class _FastInteraction(nn.Module):
    """DLRM's interaction as an operator of the library that fast tables need."""

    def forward(self, dense_features: Tensor, sparse_features: Tensor) -> Tensor:
        interaction: Tensor = ops.interact(dense_features, sparse_features)
        return interaction


class _Collisions(nn.Module):
    """TorchRec's managed collisions, which map ids of any size to rows, as they are in evaluation."""

    def __init__(self, module: ManagedCollisionCollection) -> None:
        super().__init__()
        self.features = list(module._feature_names)
        self.maps = nn.ModuleDict(module._managed_collision_modules)
        self.table_of = [list(self.maps).index(module._feature_to_table[feature]) for feature in self.features]
        for name, each in self.maps.items():
            if not isinstance(each, MCHManagedCollisionModule):
                raise UserError(
                    f"table {name!r} has a {type(each).__name__}: only TorchRec's MCHManagedCollisionModule is exported"
                )

    def forward(self, features: KeyedJaggedTensor, mutate_miss_lengths: bool = True) -> KeyedJaggedTensor:
        order = torch.tensor([features.keys().index(name) for name in self.features])
        lengths, ids, weights = permuted(
            order, features.lengths().view(len(features.keys()), -1), features.values(), features.weights_or_none()
        )
        table = torch.tensor(self.table_of).repeat_interleave(lengths.sum(1), output_size=ids.shape[0])
        remapped = ids
        for number, each in enumerate(self.maps.values()):
            remapped = torch.where(table == number, _remapped(each, ids), remapped)
        return KeyedJaggedTensor(self.features, remapped, weights, lengths=lengths.flatten())

    def evict(self) -> dict[str, None]:
        """Evict no ids."""
        return {}


def _remapped(module: Any, ids: Tensor) -> Tensor:
    """Return the row of each id; ids without one share the last."""
    if module._input_hash_func is not None:
        ids = module._input_hash_func(ids, module._input_hash_size)
    place = torch.searchsorted(module._mch_sorted_raw_ids[:-1], ids)
    is_known = module._mch_sorted_raw_ids[place] == ids
    last = module._output_global_offset + module._zch_size - 1
    rows: Tensor = torch.where(is_known, module._mch_remapped_ids_mapping[place], last)
    return rows


def serving_layer(layer: TTLinear) -> nn.Module:
    """Convert a TT layer to one dense layer or, where that reads far fewer numbers, to two dense layers of its core halves."""
    cores = layer.scaled_cores()
    cut = next(k for k in range(1, len(cores)) if set(layer.shape.col_shape[:k]) == {1} == set(layer.shape.row_shape[k:]))
    rank = layer.shape.ranks[cut - 1]
    if _WORTH * rank * (layer.in_features + layer.out_features) >= layer.in_features * layer.out_features:
        return layer.to_dense()
    first = nn.Linear(layer.in_features, rank, bias=False)
    second = nn.Linear(rank, layer.out_features, bias=layer.bias is not None)
    with torch.no_grad():
        first.weight.copy_(contract(cores[:cut])[0, :, 0][: layer.in_features].mT)
        second.weight.copy_(contract(cores[cut:])[:, 0, :, 0][:, : layer.out_features].mT)
        if layer.bias is not None:
            second.bias.copy_(layer.bias)
    return nn.Sequential(first, second)


def served_table(weights: TTTable | Tensor, *, mean: bool = False) -> ServedTable:
    """Convert a TT table, or the rows of a dense one; bags of the result are averaged if `mean`."""
    if isinstance(weights, Tensor):
        require_floats(weights)
        formed = weights.detach().float()
        return ServedTable(rows=len(formed), columns=formed.shape[1], mean=mean, formed=formed)
    cores, slabs = _folded(weights)
    rows, columns = weights.num_embeddings, weights.embedding_dim
    wide = list(itertools.takewhile(lambda slab: slab.rows.shape[1] >= _WIDE * columns, slabs))
    added = [slab.rows @ slab.columns for slab in wide]
    formed = torch.cat([torch.empty(0, columns), *added])
    if wide:
        formed += first_rows([core.permute(1, 0, 3, 2) for core in cores], weights.shape.row_shape, len(formed), columns)
        slabs = (*(Slab(rows=slab.rows[:, :0], columns=slab.columns[:0]) for slab in wide), *slabs[len(wide) :])
    if len(formed) == rows:
        cores, slabs = (), ()
    return ServedTable(
        rows=rows, columns=columns, mean=mean, formed=formed, cores=cores, slabs=slabs, row_order=weights.lookup_order
    )


def _folded(table: TTTable) -> tuple[tuple[Tensor, ...], tuple[Slab, ...]]:
    """Return cores and slabs with the diagonals multiplied in.

    For each rank, the scale is spread evenly over the two cores beside it, so the numbers of a slice have similar sizes and fit few
    bits.
    """
    cores: list[Tensor] = [core.detach().float() for core in table.cores()]
    for k, diagonal in enumerate(table.rank_parameters(), start=1):
        scale = diagonal.detach().float().flatten()
        before, after = cores[k - 1].pow(2).sum((0, 1, 2)).sqrt(), cores[k].pow(2).sum((1, 2, 3)).sqrt()
        balance = (after * scale.abs() / before).sqrt()
        balance = torch.where(balance.isfinite() & (balance > 0), balance, 1.0)
        cores[k - 1 : k + 1] = cores[k - 1] * balance, cores[k] * (scale / balance)[:, None, None, None]
    slabs = []
    for block in table.hot_blocks():
        rows, projection, scale = (part.detach().float() for part in block.block())
        slabs.append(Slab(rows=rows[0, :, 0].contiguous(), columns=scale.view(-1, 1) * projection[:, 0, :, 0]))
    return tuple(core.permute(1, 0, 3, 2).contiguous() for core in cores), tuple(slabs)
