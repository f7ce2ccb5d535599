"""A preprocessed data set as training batches, and positions for ids that something else has numbered."""

from comera_rec.data.batch import Batch
from comera_rec.data.batches import ParquetBatches
from comera_rec.data.loader import BatchLoader
from comera_rec.data.order import similarity_order

__all__ = ["Batch", "BatchLoader", "ParquetBatches", "similarity_order"]
