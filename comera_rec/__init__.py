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
        compress_state,
        compression_report,
        export_dense,
        fit_tables_,
        read_state,
        row_importance,
        swap_embedding_bag_collections_,
        swap_embedding_collections_,
        swap_embeddings_,
    )
    from comera_rec.data.order import similarity_order
    from comera_rec.nn import (
        ClassificationHead,
        EncoderBlock,
        LanguageModelHead,
        MultiheadAttention,
        TiedProjection,
        TransformerConfig,
        TransformerEncoder,
        TTEmbedding,
        TTEmbeddingBag,
        TTLinear,
        linear_factory,
        update_in_backward_,
        use_float8_,
    )
    from comera_rec.rank import RankConfig, RankScheduler, grow_ranks_, rank_param_groups, truncate_ranks_
    from comera_rec.recsys import (
        TTEmbeddingBagCollection,
        TTEmbeddingBagConfig,
        TTEmbeddingCollection,
        TTEmbeddingCollectionConfig,
        build_deepfm,
        build_dlrm,
        build_wide_deep,
    )
    from comera_rec.recsys.sharding import (
        TTEmbeddingBagCollectionSharder,
        TTEmbeddingCollectionSharder,
        TTShardingPlanner,
        load_optimizer_state_,
        optimizer_state,
        rewrap_data_parallel_,
    )
    from comera_rec.tt import TTShape, factorize, tt_svd, tt_to_dense

_LAYERS = ("tt", "nn", "rank", "recsys", "convert", "recsys.sharding", "data.order")  # cheapest import first

__version__ = "0.2.0"
__all__ = [
    "ClassificationHead",
    "CompressionReport",
    "EncoderBlock",
    "LanguageModelHead",
    "MultiheadAttention",
    "RankConfig",
    "RankScheduler",
    "TTEmbedding",
    "TTEmbeddingBag",
    "TTEmbeddingBagCollection",
    "TTEmbeddingBagCollectionSharder",
    "TTEmbeddingBagConfig",
    "TTEmbeddingCollection",
    "TTEmbeddingCollectionConfig",
    "TTEmbeddingCollectionSharder",
    "TTEmbeddingConfig",
    "TTLinear",
    "TTLinearConfig",
    "TTShape",
    "TTShardingPlanner",
    "TiedProjection",
    "TransformerConfig",
    "TransformerEncoder",
    "build_deepfm",
    "build_dlrm",
    "build_wide_deep",
    "compress_linears_",
    "compress_state",
    "compression_report",
    "export_dense",
    "factorize",
    "fit_tables_",
    "grow_ranks_",
    "linear_factory",
    "load_optimizer_state_",
    "optimizer_state",
    "rank_param_groups",
    "read_state",
    "rewrap_data_parallel_",
    "row_importance",
    "similarity_order",
    "swap_embedding_bag_collections_",
    "swap_embedding_collections_",
    "swap_embeddings_",
    "truncate_ranks_",
    "tt_svd",
    "tt_to_dense",
    "update_in_backward_",
    "use_float8_",
]


def __getattr__(name: str) -> Any:
    for layer in _LAYERS if name in __all__ else ():
        module = importlib.import_module(f"comera_rec.{layer}")
        if hasattr(module, name):
            globals()[name] = getattr(module, name)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
