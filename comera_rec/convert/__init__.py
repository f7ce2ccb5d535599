"""Conversion of dense models to TT modules and back, and reports of their sizes."""

from comera_rec.convert.budget import fit_tables_, row_importance
from comera_rec.convert.compress import compress_
from comera_rec.convert.compression import CompressionReport, LayerSize, compression_report
from comera_rec.convert.export import export_dense
from comera_rec.convert.table_compression import TableCompression
from comera_rec.nn import LinearCompression

__all__ = [
    "CompressionReport",
    "LayerSize",
    "LinearCompression",
    "TableCompression",
    "compress_",
    "compression_report",
    "export_dense",
    "fit_tables_",
    "row_importance",
]
