"""Rank adaptation: the price of size, the schedule, and truncation."""

from comera_rec.rank.param_groups import rank_param_groups
from comera_rec.rank.penalty import core_norm, model_size_surrogate, size_surrogate
from comera_rec.rank.scheduler import RankConfig, RankScheduler
from comera_rec.rank.truncation import count_tt_params, truncate_ranks_

__all__ = [
    "RankConfig",
    "RankScheduler",
    "core_norm",
    "count_tt_params",
    "model_size_surrogate",
    "rank_param_groups",
    "size_surrogate",
    "truncate_ranks_",
]
