"""comera-rec: recommendation models trained in compressed form.

Names are imported when first used, because preprocessing needs neither torch nor TorchRec.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from comera_rec.convert import (
        CompressionReport,
        TTEmbeddingConfig,
        TTLinearConfig,
        compress_linears_,
        compression_report,
        export_dense,
        swap_embedding_bag_collections_,
    )
    from comera_rec.nn import TTEmbeddingBag, TTLinear
    from comera_rec.rank import RankConfig, RankScheduler, rank_param_groups, truncate_ranks_
    from comera_rec.recsys import TTEmbeddingBagCollection, TTEmbeddingBagConfig, build_dlrm
    from comera_rec.tt import TTShape, factorize, tt_svd, tt_to_dense

_HOMES = {
    "convert": (
        "CompressionReport",
        "TTEmbeddingConfig",
        "TTLinearConfig",
        "compress_linears_",
        "compression_report",
        "export_dense",
        "swap_embedding_bag_collections_",
    ),
    "nn": ("TTEmbeddingBag", "TTLinear"),
    "rank": ("RankConfig", "RankScheduler", "rank_param_groups", "truncate_ranks_"),
    "recsys": ("TTEmbeddingBagCollection", "TTEmbeddingBagConfig", "build_dlrm"),
    "tt": ("TTShape", "factorize", "tt_svd", "tt_to_dense"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__version__ = "0.1.0"
__all__ = [
    "CompressionReport",
    "RankConfig",
    "RankScheduler",
    "TTEmbeddingBag",
    "TTEmbeddingBagCollection",
    "TTEmbeddingBagConfig",
    "TTEmbeddingConfig",
    "TTLinear",
    "TTLinearConfig",
    "TTShape",
    "build_dlrm",
    "compress_linears_",
    "compression_report",
    "export_dense",
    "factorize",
    "rank_param_groups",
    "swap_embedding_bag_collections_",
    "truncate_ranks_",
    "tt_svd",
    "tt_to_dense",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"comera_rec.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
