"""Tensor trains in TorchRec: table configs, the collection, DLRM."""

from comera_rec.recsys.collection import TTEmbeddingBagCollection
from comera_rec.recsys.config import TTEmbeddingBagConfig
from comera_rec.recsys.dlrm import build_dlrm

__all__ = ["TTEmbeddingBagCollection", "TTEmbeddingBagConfig", "build_dlrm"]
