"""Tensor-train modules in plain torch."""

from comera_rec.nn.compress import TTLinearConfig, compress_linears_
from comera_rec.nn.embedding_bag import TTEmbeddingBag
from comera_rec.nn.linear import TTLinear
from comera_rec.nn.tt_module import TTModule, named_tt_modules, replace_data_, replace_modules_, stacked_cores

__all__ = [
    "TTEmbeddingBag",
    "TTLinear",
    "TTLinearConfig",
    "TTModule",
    "compress_linears_",
    "named_tt_modules",
    "replace_data_",
    "replace_modules_",
    "stacked_cores",
]
