"""TT modules in plain torch, without TorchRec."""

from comera_rec.nn.attention import MultiheadAttention
from comera_rec.nn.compress import TTLinearConfig, compress_linears_
from comera_rec.nn.embedding import TTEmbedding
from comera_rec.nn.embedding_bag import TTEmbeddingBag
from comera_rec.nn.factories import EMBEDDING_STD, dense_embedding, linear_factory
from comera_rec.nn.heads import ClassificationHead, LanguageModelHead, TiedProjection
from comera_rec.nn.hot_rows import HotRows
from comera_rec.nn.linear import TTLinear, use_float8_
from comera_rec.nn.transformer import EncoderBlock, FeedForward, TransformerConfig, TransformerEncoder
from comera_rec.nn.tt_module import (
    TTModule,
    keep_buffers_hooks_and_mode_,
    named_tt_modules,
    parameter_owners,
    replace_data_,
    replace_modules_,
)
from comera_rec.nn.tt_table import TTTable, update_in_backward_

__all__ = [
    "EMBEDDING_STD",
    "ClassificationHead",
    "EncoderBlock",
    "FeedForward",
    "HotRows",
    "LanguageModelHead",
    "MultiheadAttention",
    "TTEmbedding",
    "TTEmbeddingBag",
    "TTLinear",
    "TTLinearConfig",
    "TTModule",
    "TTTable",
    "TiedProjection",
    "TransformerConfig",
    "TransformerEncoder",
    "compress_linears_",
    "dense_embedding",
    "keep_buffers_hooks_and_mode_",
    "linear_factory",
    "named_tt_modules",
    "parameter_owners",
    "replace_data_",
    "replace_modules_",
    "update_in_backward_",
    "use_float8_",
]
