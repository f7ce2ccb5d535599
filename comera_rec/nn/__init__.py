"""TT modules in plain torch, without TorchRec."""

from comera_rec.nn.embedding import TTEmbedding
from comera_rec.nn.embedding_bag import TTEmbeddingBag
from comera_rec.nn.hot_rows import HotRows
from comera_rec.nn.linear import TTLinear
from comera_rec.nn.linear_compression import LinearCompression, compressed_linears
from comera_rec.nn.replacement import FilterFn, keep_buffers_hooks_and_mode_, parameter_owners, replace_modules_
from comera_rec.nn.reranking import rerank_hot_rows_
from comera_rec.nn.transformer import (
    EMBEDDING_STD,
    ClassificationHead,
    EncoderBlock,
    FeedForward,
    LanguageModelHead,
    MultiheadAttention,
    TiedProjection,
    TransformerConfig,
    TransformerEncoder,
    dense_embedding,
)
from comera_rec.nn.tt_module import TTModule, named_tt_modules, replace_data_
from comera_rec.nn.tt_table import TTTable, update_in_backward_

__all__ = [
    "EMBEDDING_STD",
    "ClassificationHead",
    "EncoderBlock",
    "FeedForward",
    "FilterFn",
    "HotRows",
    "LanguageModelHead",
    "MultiheadAttention",
    "TTEmbedding",
    "TTEmbeddingBag",
    "TTLinear",
    "LinearCompression",
    "TTModule",
    "TTTable",
    "TiedProjection",
    "TransformerConfig",
    "TransformerEncoder",
    "compressed_linears",
    "dense_embedding",
    "keep_buffers_hooks_and_mode_",
    "named_tt_modules",
    "parameter_owners",
    "replace_data_",
    "replace_modules_",
    "rerank_hot_rows_",
    "update_in_backward_",
]
