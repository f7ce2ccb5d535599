"""Replacement of torch's embedding layers of any model by TT tables."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import nn
from torchrec import EmbeddingBagConfig

from comera_rec.convert.swap import TTEmbeddingConfig, plain_embeddings
from comera_rec.nn import TTEmbedding, TTEmbeddingBag, parameter_owners, replace_modules_
from comera_rec.nn.checks import COMPUTED_WEIGHT, require_config, require_init
from comera_rec.nn.tt_table import replace_dense_, require_plain_rows
from comera_rec.recsys import TTEmbeddingBagConfig

Layer = nn.Embedding | nn.EmbeddingBag
_LOGGER = logging.getLogger(__name__)


def swap_embeddings_(
    model: nn.Module,
    config: TTEmbeddingConfig,
    *,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    init: str = "random",
) -> nn.Module:
    """Replace the `torch.nn.Embedding` and `torch.nn.EmbeddingBag` layers of a model by TT tables, in place.

    Build the optimizer afterwards, because TT tables have new parameters. Frozen layers stay frozen. Layers of TorchRec's
    collections are left to `swap_embedding_bag_collections_` and `swap_embedding_collections_`. A layer stays dense if another
    module has the same weight, such as an output layer tied to it, or for options that a TT table lacks; the reason is logged at
    level INFO.

    Args:
        model: any module.
        config: which layers, and how small; `compression` applies to all layers that `filter_fn` passes, taken together.
        filter_fn: (module, fully qualified name) -> whether to consider the layer; default all.
        init: "random", with the standard deviation of the weights that are replaced, or "tt_svd" to start from them.

    Raises:
        ValueError: if no layer matched.

    Returns:
        The model; or the new layer, if the model itself is one.

    Example:
        >>> model = nn.ModuleDict({"clicks": nn.EmbeddingBag(50_000, 16, mode="sum")})
        >>> swap_embeddings_(model, TTEmbeddingConfig(tt_ranks=4))["clicks"].shape.ranks
        (4,)
    """
    require_config(config, TTEmbeddingConfig)
    require_init(init)
    owners = parameter_owners(model)
    layers = {
        name or "the model": layer for name, layer in plain_embeddings(model).items() if filter_fn is None or filter_fn(layer, name)
    }
    dense = []
    for name, layer in layers.items():
        if reason := _reason_to_stay_dense(layer, [owner for owner, other in owners.get(layer.weight, ()) if other is not layer]):
            dense.append(name)
            _LOGGER.info("%s stays dense: %s", name, reason)
    configs = [
        EmbeddingBagConfig(num_embeddings=layer.num_embeddings, embedding_dim=layer.embedding_dim, name=name, feature_names=[name])
        for name, layer in layers.items()
    ]
    config.require_tables(layers)
    tables = config.table_configs(configs, dense=dense)
    replacements: dict[nn.Module, nn.Module] = {
        layer: _swapped(layer, table, init) for layer, table in zip(layers.values(), tables, strict=True) if table.is_tt
    }
    if not replacements:
        raise ValueError(
            f"no embedding layer was swapped: none that passes filter_fn has at least {config.min_rows} rows and an unshared "
            "weight; lower min_rows, or see the reasons in the log at level INFO"
        )
    return replace_modules_(model, replacements)


def _reason_to_stay_dense(layer: Layer, sharers: list[str]) -> str | None:
    if "weight" not in layer._parameters:
        return COMPUTED_WEIGHT
    if sharers:
        return f"its weight is also that of {sharers[0]!r}"
    try:
        require_plain_rows(layer)
    except ValueError as error:
        return str(error)
    return None


def _swapped(layer: Layer, table: TTEmbeddingBagConfig, init: str) -> nn.Module:
    sizes = {"shape": table.tt_shape(), "hot_rows": table.hot_rows, "name": table.name}
    swapped = TTEmbedding.like(layer, **sizes) if isinstance(layer, nn.Embedding) else TTEmbeddingBag.like(layer, **sizes)
    return replace_dense_(swapped, layer, init, table.name)
