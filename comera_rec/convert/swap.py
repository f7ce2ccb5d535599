"""Put tensor-train collections in place of the EmbeddingBagCollections of any model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torchrec import EmbeddingBagCollection
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from comera_rec.nn import replace_modules_
from comera_rec.nn.compress import require_init, require_one_size
from comera_rec.recsys import TTEmbeddingBagCollection, TTEmbeddingBagConfig
from comera_rec.tt import TTShape


@dataclass(frozen=True, kw_only=True)
class TTEmbeddingConfig:
    """Which tables become tensor trains, and how small.

    Attributes:
        tt_ranks: ranks, one for all bonds or one each. Give at most one of `tt_ranks` and `compression`; default rank 16.
        compression: dense parameters over tensor-train parameters of each table, at least; the largest ranks within that
        budget are taken. order: number of cores, 2 to 4; default chosen by `TTShape.for_table`.
        min_rows: tables with fewer rows stay dense.
    """

    tt_ranks: int | tuple[int, ...] | None = None
    compression: float | None = None
    order: int | None = None
    min_rows: int = 10_000

    def __post_init__(self) -> None:
        require_one_size(self.tt_ranks, self.compression)

    def shape_for(self, num_embeddings: int, embedding_dim: int) -> TTShape | None:
        """Modes and ranks of a table of this size, or None where it stays dense."""
        if num_embeddings < self.min_rows:
            return None
        budget = None if self.compression is None else max(1, int(num_embeddings * embedding_dim / self.compression))
        return TTShape.for_table(num_embeddings, embedding_dim, tt_ranks=self.tt_ranks, order=self.order, budget_params=budget)

    def table_config(self, config: EmbeddingBagConfig) -> TTEmbeddingBagConfig:
        """A table's config with the shape this config gives it."""
        return TTEmbeddingBagConfig.from_dense(config, self.shape_for(config.num_embeddings, config.embedding_dim))


def swap_embedding_bag_collections_(
    model: nn.Module,
    config: TTEmbeddingConfig,
    *,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    init: str = "random",
) -> nn.Module:
    """Replace every `torchrec.EmbeddingBagCollection` of a model by its tensor-train version, in place.

    Tables below `config.min_rows` keep their parameters; build the optimizer afterwards, because the others' are new.

    Args:
        model: any module that holds unsharded EmbeddingBagCollections.
        config: which tables, and how small.
        filter_fn: (module, fully qualified name) -> whether to swap that collection; default all.
        init: "random", or "tt_svd" to start from the tables' weights.

    Raises:
        ValueError: if no collection with a large enough table matched.

    Returns:
        The model (the new collection where the model itself is one).

    Example:
        >>> import torchrec
        >>> table = torchrec.EmbeddingBagConfig(name="t", num_embeddings=50_000, embedding_dim=16, feature_names=["f"])
        >>> model = torch.nn.Sequential(torchrec.EmbeddingBagCollection([table]))
        >>> swap_embedding_bag_collections_(model, TTEmbeddingConfig(tt_ranks=4))[0].tt_bag("t").shape.ranks
        (4,)
    """
    require_init(init)
    replacements: dict[nn.Module, nn.Module] = {}
    swapped_before = {module.dense_bags for module in model.modules() if isinstance(module, TTEmbeddingBagCollection)}
    for name, module in model.named_modules():
        if type(module) is not EmbeddingBagCollection or module in swapped_before:
            continue
        if filter_fn is None or filter_fn(module, name):
            tables = [config.table_config(table) for table in module.embedding_bag_configs()]
            if any(table.is_tt for table in tables):
                replacements[module] = _swapped(module, tables, init)
    if not replacements:
        raise ValueError(
            "no EmbeddingBagCollection was swapped: none passed filter_fn with a table of at least "
            f"{config.min_rows} rows; lower min_rows"
        )
    return replace_modules_(model, replacements)


def _swapped(module: EmbeddingBagCollection, tables: list[TTEmbeddingBagConfig], init: str) -> TTEmbeddingBagCollection:
    swapped = TTEmbeddingBagCollection(tables, module.is_weighted(), module.device)
    for table in tables:
        bag = module.embedding_bags[table.name]
        if not table.is_tt:
            assert isinstance(swapped.dense_bags, EmbeddingBagCollection)
            swapped.dense_bags.embedding_bags[table.name] = bag
        elif init == "tt_svd":
            weight: torch.Tensor = bag.weight
            swapped.tt_bag(table.name).set_dense_matrix_(weight.detach())
    return swapped.train(module.training)
