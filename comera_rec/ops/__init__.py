"""Operations on tensors, registered with torch.library where they are hot."""

from comera_rec.ops.gathered_matmul import gathered_matmul
from comera_rec.ops.lookup import LookupPlan, check_ids, plan_lookup, pool_bags, stack_cores, tt_rows

__all__ = ["LookupPlan", "check_ids", "gathered_matmul", "plan_lookup", "pool_bags", "stack_cores", "tt_rows"]
