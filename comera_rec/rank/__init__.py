"""Rank adaptation: the price of size, scores of ranks, the schedule, and truncation."""

from comera_rec.rank.config import RankConfig
from comera_rec.rank.penalty import core_norm, size_surrogate
from comera_rec.rank.scheduler import RankScheduler
from comera_rec.rank.selection import within_budget
from comera_rec.rank.truncation import count_tt_params, keep_ranks_, truncate_ranks_, unwrapped
from comera_rec.rank.tt_modules import rank_param_groups

__all__ = [
    "RankConfig",
    "RankScheduler",
    "core_norm",
    "count_tt_params",
    "keep_ranks_",
    "rank_param_groups",
    "size_surrogate",
    "truncate_ranks_",
    "unwrapped",
    "within_budget",
]
