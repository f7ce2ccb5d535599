"""Replacement of the embedding collections of any model by TT collections."""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig, EmbeddingConfig

from comera_rec.nn import TTEmbeddingBag, keep_buffers_hooks_and_mode_, parameter_owners, replace_modules_
from comera_rec.nn.checks import require_config, require_init, require_one_size
from comera_rec.nn.tt_table import replace_dense_
from comera_rec.recsys import (
    TTEmbeddingBagCollection,
    TTEmbeddingBagConfig,
    TTEmbeddingCollection,
    TTEmbeddingCollectionConfig,
)
from comera_rec.tt import Blocks, TTShape, blocks_params, choose_hot_blocks

AUTO_SHARES = (0.8, 0.5, 0.25, 0.0)  # of hot rows; "auto" takes the first that leaves room for TT rank 1
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TTEmbeddingConfig:
    """Settings of the swaps: which tables become TT tables, and how small.

    Attributes:
        tt_ranks: one rank for all bonds, or one for each. Give at most one of `tt_ranks` and `compression`; default rank 16.
        compression: least ratio of dense to compressed parameters of a whole collection, tables that stay dense included. All its
            TT tables then have one rank, the largest that reaches it.
        order: number of cores, 2 to 4. Default 2, or one more than `tt_ranks` has entries; with `compression` the lowest order at
            which the rank reaches 8, or else the one with the largest rank.
        min_rows: tables with fewer rows stay dense.
        dense_tables: names of tables that stay dense whatever their size; for `swap_embeddings_`, of layers.
        hot_rows: share of the parameters of TT tables, from 0 to below 1, that is spent on hot rows, narrow ones for as many ids as
            possible (`comera_rec.tt.choose_hot_blocks`); with given ranks, hot rows are extra. "auto" is 0.8, or less if TT rank 1
            would not fit beside that, and 0 with given ranks. Use it only where ids are ordered by frequency, 0 being the most
            frequent, as `comera preprocess` numbers them.

    Raises:
        ValueError: for values out of range, or both `tt_ranks` and `compression`.
    """

    tt_ranks: int | tuple[int, ...] | None = None
    compression: float | None = None
    order: int | None = None
    min_rows: int = 10_000
    hot_rows: float | Literal["auto"] = 0
    dense_tables: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_one_size(self.tt_ranks, self.compression)
        if self.order not in (None, 2, 3, 4):
            raise ValueError(f"order is {self.order!r}: embedding tables take 2, 3 or 4 cores")
        if not isinstance(self.min_rows, int) or self.min_rows < 0:
            raise ValueError(f"min_rows is {self.min_rows!r}: give a number of rows")
        if self.hot_rows != "auto" and not (isinstance(self.hot_rows, int | float) and 0 <= self.hot_rows < 1):
            raise ValueError(f"hot_rows is {self.hot_rows!r}: give 'auto', or a share of the parameters from 0 to below 1")
        if not isinstance(self.dense_tables, tuple) or not all(self.dense_tables):
            raise ValueError(f"dense_tables is {self.dense_tables!r}: give a tuple of names")

    def require_tables(self, names: Collection[str]) -> None:
        """Raise ValueError if `dense_tables` has a name that is not one of the tables'."""
        if unknown := [name for name in self.dense_tables if name not in names]:
            raise ValueError(f"dense_tables names {unknown[0]!r}, which is no table: choose from {', '.join(map(repr, names))}")

    def table_configs(self, tables: Sequence[Any], *, dense: Collection[str] = ()) -> list[Any]:
        """Return the configs of a collection's tables with the shapes that this config gives them.

        Args:
            tables: TorchRec's configs of the collection's tables.
            dense: names of further tables that stay dense.

        Raises:
            ValueError: if not even rank 1 reaches the compression.
        """
        large, total, small = self._large_tables(tables, dense)
        budget = total / self.compression - small if self.compression is not None and large else None
        shares = AUTO_SHARES if self.hot_rows == "auto" and budget is not None else (self._least_share,)
        for share in shares:
            hot, shapes = self._sizes(large, budget, share)
            if shapes is not None:
                sizes = {table.name: size for table, *size in zip(large, shapes, hot, strict=True)}
                kinds = [TTEmbeddingCollectionConfig if isinstance(t, EmbeddingConfig) else TTEmbeddingBagConfig for t in tables]
                return [kind.from_dense(t, *sizes.get(t.name, (None,))) for kind, t in zip(kinds, tables, strict=True)]
        raise ValueError(
            f"compression {self.compression} can't be reached: the tables that stay dense (below {self.min_rows} rows"
            f"{', in dense_tables' if self.dense_tables else ''}{', or with a shared weight' if dense else ''}) and "
            f"the others at rank 1{f' beside hot_rows {self.hot_rows}' if shares[-1] else ''} are larger than that; lower "
            f"min_rows, or lower compression to {self.most_compression(tables, dense=dense):g}"
        )

    def most_compression(self, tables: Sequence[Any], *, dense: Collection[str] = ()) -> float:
        """Return the largest compression that `table_configs` can reach, rounded down to tenths; infinity without TT tables."""
        large, total, small = self._large_tables(tables, dense)
        if not large:
            return math.inf
        least = min(self._params(large, 1, order) for order in ((self.order,) if self.order else (2, 3, 4)))
        return math.floor(10 * total / (small + least / (1 - self._least_share))) / 10

    @property
    def _least_share(self) -> float:
        """The least share of hot rows that the config allows."""
        return 0 if self.hot_rows == "auto" else self.hot_rows

    def _large_tables(self, tables: Sequence[Any], dense: Collection[str]) -> tuple[list[Any], int, int]:
        """Return the tables that become TT tables, the dense parameters of all tables, and those of the others."""
        kept = {*dense, *self.dense_tables}
        large = [table for table in tables if table.num_embeddings >= self.min_rows and table.name not in kept]
        total, in_large = (sum(table.num_embeddings * table.embedding_dim for table in part) for part in (tables, large))
        return large, total, total - in_large

    def _sizes(
        self, tables: Sequence[BaseEmbeddingConfig], budget: float | None, share: float
    ) -> tuple[list[Blocks], list[TTShape] | None]:
        """Return hot rows and TT shapes of tables; None for the shapes if rank 1 doesn't fit the budget beside the hot rows."""
        if budget is None:
            shapes = [self._shape(table, self.tt_ranks, self.order) for table in tables]
            return _hot_rows(tables, share / (1 - share) * sum(shape.num_params for shape in shapes)), shapes
        hot = _hot_rows(tables, share * budget)
        taken = sum(blocks_params(blocks, table.embedding_dim) for blocks, table in zip(hot, tables, strict=True))
        fitting = self._fitting_shapes(tables, budget - taken)
        if share and fitting:  # spend what whole ranks leave unused
            hot = _hot_rows(tables, budget - sum(shape.num_params for shape in fitting))
        return hot, fitting

    @staticmethod
    def _shape(table: BaseEmbeddingConfig, tt_ranks: int | tuple[int, ...] | None, order: int | None) -> TTShape:
        return TTShape.for_table(table.num_embeddings, table.embedding_dim, tt_ranks=tt_ranks, order=order)

    def _fitting_shapes(self, tables: Sequence[BaseEmbeddingConfig], budget: float) -> list[TTShape] | None:
        best: tuple[int, list[TTShape] | None] = (0, None)
        for order in (self.order,) if self.order else (2, 3, 4):
            ranks = range(1, max(table.num_embeddings for table in tables) + 1)
            rank = bisect_right(ranks, budget, key=lambda r: self._params(tables, r, order))
            if rank > best[0]:
                best = rank, [self._shape(table, rank, order) for table in tables]
            if rank >= 8:
                break
        return best[1]

    def _params(self, tables: Sequence[BaseEmbeddingConfig], rank: int, order: int) -> int:
        return sum(self._shape(table, rank, order).num_params for table in tables)


def _hot_rows(tables: Sequence[BaseEmbeddingConfig], budget_params: float) -> list[Blocks]:
    if budget_params <= 0:
        return [()] * len(tables)
    dims = {table.embedding_dim for table in tables}
    blocks: dict[str, Blocks] = {}
    for dim in dims:  # each gets a part of the budget in proportion to its tables' dense parameters
        same_dim = [table for table in tables if table.embedding_dim == dim]
        part = sum(table.num_embeddings * dim for table in same_dim) / sum(t.num_embeddings * t.embedding_dim for t in tables)
        chosen = choose_hot_blocks([table.num_embeddings for table in same_dim], dim, part * budget_params)
        blocks |= zip([table.name for table in same_dim], chosen, strict=True)
    return [blocks[table.name] for table in tables]


def swap_embedding_bag_collections_(
    model: nn.Module,
    config: TTEmbeddingConfig,
    *,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    init: str = "random",
) -> nn.Module:
    """Replace every `torchrec.EmbeddingBagCollection` of a model by its TT version, in place.

    Tables below `config.min_rows` keep their parameters; build the optimizer afterwards, because TT tables have new ones. Frozen
    tables stay frozen, and dtypes are kept. Tables that share their weight with another module, or are registered in one, stay
    dense, which is logged at level INFO.

    Args:
        model: any module that contains unsharded EmbeddingBagCollections.
        config: which tables, and how small.
        filter_fn: (module, fully qualified name) -> whether to swap that collection; default all.
        init: "random", or "tt_svd" to start from the tables' weights.

    Raises:
        ValueError: if no collection with a large enough table matched.

    Returns:
        The model; or the new collection, if the model itself is a collection.

    Example:
        >>> import torchrec
        >>> table = torchrec.EmbeddingBagConfig(name="t", num_embeddings=50_000, embedding_dim=16, feature_names=["f"])
        >>> model = torch.nn.Sequential(torchrec.EmbeddingBagCollection([table]))
        >>> swap_embedding_bag_collections_(model, TTEmbeddingConfig(tt_ranks=4))[0].tt_bag("t").shape.ranks
        (4,)
    """
    return _swap_(model, EmbeddingBagCollection, config, filter_fn, init)


def swap_embedding_collections_(
    model: nn.Module,
    config: TTEmbeddingConfig,
    *,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    init: str = "random",
) -> nn.Module:
    """Replace every `torchrec.EmbeddingCollection`, whose rows are not pooled, by its TT version, in place.

    Arguments, errors and result are those of `swap_embedding_bag_collections_`.

    Example:
        >>> import torchrec
        >>> table = torchrec.EmbeddingConfig(name="t", num_embeddings=50_000, embedding_dim=16, feature_names=["f"])
        >>> model = torch.nn.Sequential(torchrec.EmbeddingCollection([table]))
        >>> swap_embedding_collections_(model, TTEmbeddingConfig(tt_ranks=4))[0].tables.tt_bag("t").shape.ranks
        (4,)
    """
    return _swap_(model, EmbeddingCollection, config, filter_fn, init)


def _swap_(
    model: nn.Module,
    kind: type[EmbeddingBagCollection] | type[EmbeddingCollection],
    config: TTEmbeddingConfig,
    filter_fn: Callable[[nn.Module, str], bool] | None,
    init: str,
) -> nn.Module:
    require_config(config, TTEmbeddingConfig)
    require_init(init)
    replacements: dict[nn.Module, nn.Module] = {}
    all_shared = set[str]()
    owners, paths = parameter_owners(model), _paths(model)
    swapped_before = {module.dense_bags for module in model.modules() if isinstance(module, TTEmbeddingBagCollection)}
    collections = [
        module
        for name, module in model.named_modules()
        if type(module) is kind and module not in swapped_before and (filter_fn is None or filter_fn(module, name))
    ]
    config.require_tables(
        [table.name for module in collections for table in _configs(module)] if collections else config.dense_tables
    )
    for module in collections:
        owner_names = {
            table: {owner for owner, _ in owners[bag.weight]} | _paths_outside(module, bag, paths)
            for table, bag in _tables(module).items()
        }
        shared = {table: sharers for table, sharers in owner_names.items() if len(sharers) > 1}
        for table, sharers in shared.items():
            _LOGGER.info("table %r stays dense: its weight is shared by %s", table, " and ".join(map(repr, sorted(sharers))))
        all_shared |= {table.name for table in _configs(module) if table.num_embeddings >= config.min_rows} & shared.keys()
        tables = config.table_configs(_configs(module), dense=shared)
        if any(table.is_tt for table in tables):
            replacements[module] = _swapped(module, tables, init)
    if not replacements:
        reason = _why_none(model, kind, config, bool(collections), all_shared, swapped_before)
        raise ValueError(f"no {kind.__name__} was swapped: {reason}")
    return replace_modules_(model, replacements)


def _why_none(
    model: nn.Module, kind: type[nn.Module], config: TTEmbeddingConfig, matched: bool, shared: set[str], swapped_before: set[Any]
) -> str:
    if matched:
        if shared:
            names = ", ".join(map(repr, sorted(shared)))
            return (
                f"all tables of at least {config.min_rows} rows share their weight with other modules ({names}): "
                "give them separate weights, or lower min_rows for the others"
            )
        named = " or are in dense_tables" if config.dense_tables else ""
        return f"all tables have fewer than {config.min_rows} rows{named}; lower min_rows"
    types = {type(module) for module in model.modules() if module not in swapped_before}
    if kind in types:
        return "filter_fn rejected all: leave it out, or accept at least one"
    if other := next((_SWAPS[each] for each in types if each in _SWAPS), "swap_embeddings_" if plain_embeddings(model) else ""):
        return f"the model has none; for the tables that it has, call {other}"
    return (
        "all of the model's are swapped already: swap each model once"
        if swapped_before
        else "the model has none, or they are sharded already: swap before sharding"
    )


def _paths(model: nn.Module) -> dict[nn.Module, set[str]]:
    """Return all fully qualified names of every module."""
    paths: dict[nn.Module, set[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, set()).add(name)
    return paths


def _paths_outside(collection: nn.Module, table: nn.Module, paths: dict[nn.Module, set[str]]) -> set[str]:
    """Return the names of a collection's table that don't go through the collection."""
    return {path for path in paths[table] if not any(path.startswith(f"{name}." if name else "") for name in paths[collection])}


def plain_embeddings(model: nn.Module) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    """Return torch's embedding layers (not subclasses) outside TorchRec's collections, by fully qualified name."""
    collections = (EmbeddingBagCollection, EmbeddingCollection)
    inside = {child for module in model.modules() if isinstance(module, collections) for child in module.modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) in (nn.Embedding, nn.EmbeddingBag) and module not in inside
    }


_SWAPS: dict[type[nn.Module], str] = {
    EmbeddingBagCollection: "swap_embedding_bag_collections_",
    EmbeddingCollection: "swap_embedding_collections_",
}


def _configs(module: nn.Module) -> Sequence[EmbeddingBagConfig] | Sequence[EmbeddingConfig]:
    if isinstance(module, EmbeddingCollection):
        return module.embedding_configs()
    assert isinstance(module, EmbeddingBagCollection)
    return module.embedding_bag_configs()


def _tables(module: Any) -> Any:
    """Return the nn.EmbeddingBags or nn.Embeddings of a collection, by name, in the collection's own ModuleDict."""
    return module.embeddings if isinstance(module, EmbeddingCollection) else module.embedding_bags


def _swapped(module: nn.Module, tables: Sequence[Any], init: str) -> nn.Module:
    device = next(module.parameters()).device  # where the tables are now; module.device is where they were made
    swapped: TTEmbeddingCollection | TTEmbeddingBagCollection
    if isinstance(module, EmbeddingCollection):
        swapped = TTEmbeddingCollection(tables, device, module.need_indices(), module.use_gather_select())
        collection = swapped.tables
    else:
        assert isinstance(module, EmbeddingBagCollection)
        swapped = collection = TTEmbeddingBagCollection(tables, module.is_weighted(), device)
    keep_buffers_hooks_and_mode_(swapped, module)
    replaced = _tables(module)
    for name, bag in collection.embedding_bags.items():
        weight = replaced[name].weight
        if isinstance(bag, TTEmbeddingBag):
            replace_dense_(bag.to(weight.dtype), replaced[name], init, name)
        else:
            _tables(collection.dense_bags)[name] = replaced[name]
    return swapped
