"""A preprocessed data set as training batches."""

from comera_rec.data.batch import Batch
from comera_rec.data.batches import ParquetBatches
from comera_rec.data.loader import BatchLoader

__all__ = ["Batch", "BatchLoader", "ParquetBatches"]
