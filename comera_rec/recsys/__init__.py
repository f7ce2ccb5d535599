"""TT tables in TorchRec: table configs, collections, and models."""

from comera_rec.recsys.collection import TTEmbeddingBagCollection
from comera_rec.recsys.config import TTEmbeddingBagConfig, TTEmbeddingConfig
from comera_rec.recsys.dlrm import build_dlrm
from comera_rec.recsys.sequences import TTEmbeddingCollection

__all__ = [
    "TTEmbeddingBagCollection",
    "TTEmbeddingBagConfig",
    "TTEmbeddingCollection",
    "TTEmbeddingConfig",
    "build_dlrm",
]
