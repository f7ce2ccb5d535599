"""TT tables in TorchRec: table configs, the collections, DLRM."""

from comera_rec.recsys.collection import TTEmbeddingBagCollection
from comera_rec.recsys.config import TTEmbeddingBagConfig, TTEmbeddingCollectionConfig
from comera_rec.recsys.dlrm import build_deepfm, build_dlrm
from comera_rec.recsys.sequences import TTEmbeddingCollection

__all__ = [
    "TTEmbeddingBagCollection",
    "TTEmbeddingBagConfig",
    "TTEmbeddingCollection",
    "TTEmbeddingCollectionConfig",
    "build_deepfm",
    "build_dlrm",
]
