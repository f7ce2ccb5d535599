"""Operations on tensors, registered with torch.library where they are hot."""

from comera_rec.ops.gathered_matmul import gathered_matmul
from comera_rec.ops.lookup import Deduplicated, deduplicate, tt_rows

__all__ = ["Deduplicated", "deduplicate", "gathered_matmul", "tt_rows"]
