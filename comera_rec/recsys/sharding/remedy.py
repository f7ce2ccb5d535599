"""What to change if no plan fits: the fewest tables, and the largest TT ranks, with which the planner finds one."""

from __future__ import annotations

import copy
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torchrec import EmbeddingBagCollection
from torchrec.distributed.planner.types import ShardingOption, Topology

from comera_rec.recsys.collection import TTEmbeddingBagCollection
from comera_rec.recsys.config import TTEmbeddingBagConfig
from comera_rec.tt import TTShape


@dataclass(frozen=True, kw_only=True)
class _Table:
    path: str
    """Path of its collection in the model."""
    config: TTEmbeddingBagConfig
    size: int
    """Bytes that its largest shard takes on a device, with the sharding type for which they are fewest."""

    def at_rank(self, tt_rank: int) -> TTEmbeddingBagConfig:
        """Limit every bond to `tt_rank` and drop hot rows; a dense table becomes a TT table."""
        if self.config.is_tt:
            shape = self.config.tt_shape()
            shape = shape.with_ranks([min(tt_rank, r) for r in shape.ranks])
        else:
            shape = TTShape.for_table(self.config.num_embeddings, self.config.embedding_dim, tt_ranks=tt_rank, order=2)
        return self.config.with_changes(shape=shape, tt_ranks=None, hot_rows=())

    @property
    def limit(self) -> int:
        """Largest TT rank with which `at_rank` changes the table."""
        return max(self.at_rank(self.config.num_embeddings).tt_shape().ranks) - self.config.is_tt


def find_remedy(module: nn.Module, options: Sequence[ShardingOption], room: Topology, fits: Callable[[nn.Module], bool]) -> str:
    """Say in a sentence which table takes most memory, and the smallest change of TT ranks with which everything fits.

    Args:
        module: the model that could not be planned.
        options: sharding options of its tables.
        room: the storage that devices have for tables.
        fits: whether a model can be planned.
    """
    memory = "hbm" if room.compute_device == "cuda" else "ddr"
    tables = sorted(_tables(module, options, memory), key=lambda table: -table.size)
    if not tables:
        return "the tables don't fit: plan for more devices, or larger ones"
    largest = tables[0]
    free = min(getattr(device.storage, memory) for device in room.devices)

    def fits_at(count: int, tt_rank: int) -> bool:
        return fits(_with_tables(module, [(table.path, table.at_rank(tt_rank)) for table in tables[:count]]))

    problem = (
        f"the tables don't fit: {largest.config.name!r} takes {_gib(largest.size)} of a device even when divided best, and a "
        f"device has {_gib(free)} for all tables"
    )
    count = 1 + bisect_left(range(1, len(tables) + 1), True, key=lambda count: fits_at(count, 1))
    if count > len(tables):
        return (
            f"{problem}: not even TT tables of rank 1 fit, because their lookups need too much memory: use a batch smaller than "
            f"{options[0].batch_size}, or larger devices"
        )
    changed = tables[:count]
    limit = max(table.limit for table in changed)
    tt_rank = bisect_right(range(1, 1 + limit), False, key=lambda tt_rank: not fits_at(count, tt_rank))
    compressed = [table.config.name for table in changed if table.config.is_tt]
    dense = [table.config.name for table in changed if not table.config.is_tt]
    remedies = []
    if compressed:
        has_hot_rows = any(table.config.hot_rows for table in changed)
        remedies.append(f"give {_listed(compressed)} TT ranks of at most {tt_rank}{' and no hot rows' * has_hot_rows}")
    if dense:
        remedies.append(f"make {_listed(dense)} TT tables with ranks of at most {tt_rank} (TTEmbeddingBagConfig with tt_ranks)")
    return f"{problem}: {' and '.join(remedies)}, or plan for more devices than {room.world_size}"


def _listed(names: Sequence[str], most: int = 3) -> str:
    shown = [repr(name) for name in names[:most]]
    more = len(names) - len(shown)
    return ", ".join(shown) + f" and the {more} next largest" * (more > 0)


def _tables(module: nn.Module, options: Sequence[ShardingOption], memory: str) -> list[_Table]:
    """List the tables that are or can become TT tables, each with the size of its smallest option."""
    smallest: dict[tuple[str, str], _Table] = {}
    modules = dict(module.named_modules())
    for option in options:
        path = option.module[0]
        collection = modules[path]
        if isinstance(collection, TTEmbeddingBagCollection | EmbeddingBagCollection):
            size = max(getattr(shard.storage, memory) for shard in option.shards)
            known = smallest.get((path, option.name))
            if known is None or size < known.size:
                config = next(config for config in _configs(collection) if config.name == option.name)
                smallest[path, option.name] = _Table(path=path, config=config, size=size)
    return list(smallest.values())


def _configs(collection: TTEmbeddingBagCollection | EmbeddingBagCollection) -> list[TTEmbeddingBagConfig]:
    """Return the configs of a collection's tables with their present TT ranks, which may have changed since it was built."""
    if isinstance(collection, EmbeddingBagCollection):
        return [TTEmbeddingBagConfig.from_dense(config, None) for config in collection.embedding_bag_configs()]
    return [
        config.with_changes(shape=collection.tt_bag(config.name).shape, tt_ranks=None) if config.is_tt else config
        for config in collection.embedding_bag_configs()
        if isinstance(config, TTEmbeddingBagConfig)
    ]


def _with_tables(module: nn.Module, changes: Sequence[tuple[str, TTEmbeddingBagConfig]]) -> nn.Module:
    """Return a model for the planner that shares everything with `module` but the changed tables, which are on the meta device."""
    modules = dict(module.named_modules())
    by_path: dict[str, dict[str, TTEmbeddingBagConfig]] = {}
    for path, config in changes:
        by_path.setdefault(path, {})[config.name] = config
    for path, configs in by_path.items():
        old = modules[path]
        assert isinstance(old, TTEmbeddingBagCollection | EmbeddingBagCollection)
        tables = [configs.get(config.name, config) for config in _configs(old)]
        is_pooled = isinstance(old, EmbeddingBagCollection) or old.is_pooled
        module = _replaced(module, path, TTEmbeddingBagCollection(tables, old.is_weighted(), "meta", is_pooled=is_pooled))
    return module


def _replaced(module: nn.Module, path: str, new: nn.Module) -> nn.Module:
    if not path:
        return new
    head, _, rest = path.partition(".")
    children: Mapping[str, nn.Module | None] = module._modules
    child = children[head]
    assert child is not None
    twin = copy.copy(module)
    twin._modules = {**children, head: _replaced(child, rest, new)}
    return twin


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"
