"""Operations on tensors; costly ones are registered with torch.library. Each has its definition in plain torch beside it."""

from comera_rec.ops.bags import check_ids, tt_bags
from comera_rec.ops.interaction import interact
from comera_rec.ops.plan import LookupPlan, PairPlan, plan_lookup
from comera_rec.ops.tt_linear import tt_linear

__all__ = [
    "LookupPlan",
    "PairPlan",
    "check_ids",
    "interact",
    "plan_lookup",
    "tt_bags",
    "tt_linear",
]
