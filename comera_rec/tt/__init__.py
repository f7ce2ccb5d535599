"""Mathematics on shapes and cores; no modules, no state."""

from comera_rec.tt.cores import contract, init_cores_, tt_to_dense
from comera_rec.tt.cost import LookupCost, Work
from comera_rec.tt.digits import row_digits, rows_from_digits
from comera_rec.tt.modes import factorize, require_positive
from comera_rec.tt.shape import TTShape, max_ranks, table_candidates
from comera_rec.tt.svd import tt_svd

__all__ = [
    "LookupCost",
    "TTShape",
    "Work",
    "contract",
    "factorize",
    "init_cores_",
    "max_ranks",
    "require_positive",
    "row_digits",
    "rows_from_digits",
    "table_candidates",
    "tt_svd",
    "tt_to_dense",
]
