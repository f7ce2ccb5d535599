"""comera-rec: recommendation models trained in compressed form.

Names are imported when first used, because preprocessing needs neither torch nor TorchRec.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from data_pipeline.errors import naming_extras

if TYPE_CHECKING:
    from comera_rec.convert import TableCompression, compress_, compression_report, export_dense
    from comera_rec.data.order import similarity_order
    from comera_rec.nn import LinearCompression, TTEmbedding, TTEmbeddingBag, TTLinear
    from comera_rec.rank import RankConfig, RankScheduler
    from comera_rec.recsys import (
        TTEmbeddingBagCollection,
        TTEmbeddingBagConfig,
        TTEmbeddingCollection,
        TTEmbeddingConfig,
        build_dlrm,
    )
    from comera_rec.recsys.sharding import TTEmbeddingBagCollectionSharder, TTShardingPlanner
    from comera_rec.serving.export import export
    from comera_rec.tt import TTShape

_LAYERS = ("tt", "nn", "rank", "recsys", "convert", "recsys.sharding", "serving.export", "data.order")  # cheapest import first

__version__ = "0.3.0.dev0"
__all__ = [
    "LinearCompression",
    "RankConfig",
    "RankScheduler",
    "TTEmbedding",
    "TTEmbeddingBag",
    "TTEmbeddingBagCollection",
    "TTEmbeddingBagCollectionSharder",
    "TTEmbeddingBagConfig",
    "TTEmbeddingCollection",
    "TTEmbeddingConfig",
    "TTLinear",
    "TTShape",
    "TTShardingPlanner",
    "TableCompression",
    "build_dlrm",
    "compress_",
    "compression_report",
    "export",
    "export_dense",
    "similarity_order",
]


def __getattr__(name: str) -> Any:
    for layer in _LAYERS if name in __all__ else ():
        with naming_extras():
            module = importlib.import_module(f"comera_rec.{layer}")
        found = getattr(module, name, None)
        if found is not None and not isinstance(found, ModuleType):  # convert.export is another module
            globals()[name] = found
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
