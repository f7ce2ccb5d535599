"""Conversion of dense models to TT modules and back, and reports of their sizes."""

from comera_rec.convert.budget import fit_tables_
from comera_rec.convert.compression import CompressionReport, LayerSize, compression_report
from comera_rec.convert.embeddings import swap_embeddings_
from comera_rec.convert.export import export_dense
from comera_rec.convert.state import compress_state, read_state, row_importance
from comera_rec.convert.swap import TTEmbeddingConfig, swap_embedding_bag_collections_, swap_embedding_collections_
from comera_rec.nn import TTLinearConfig, compress_linears_

__all__ = [
    "CompressionReport",
    "LayerSize",
    "TTEmbeddingConfig",
    "TTLinearConfig",
    "compress_linears_",
    "compress_state",
    "compression_report",
    "export_dense",
    "fit_tables_",
    "read_state",
    "row_importance",
    "swap_embedding_bag_collections_",
    "swap_embedding_collections_",
    "swap_embeddings_",
]
