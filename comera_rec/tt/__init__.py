"""Mathematics of TT shapes and cores, without modules or state."""

from comera_rec.tt.cores import contract, first_rows, init_cores_, scaled_cores, tt_to_dense
from comera_rec.tt.cost import dense_cost, tt_cost
from comera_rec.tt.digits import row_digits
from comera_rec.tt.hot_blocks import Blocks, blocks_params, choose_hot_blocks
from comera_rec.tt.layout import is_slice_major, slice_major, slice_major_stride
from comera_rec.tt.modes import factorize, require_positive
from comera_rec.tt.shape import TTShape, max_ranks
from comera_rec.tt.svd import tt_svd, tt_svd_spectra

__all__ = [
    "Blocks",
    "TTShape",
    "blocks_params",
    "choose_hot_blocks",
    "contract",
    "dense_cost",
    "factorize",
    "first_rows",
    "init_cores_",
    "is_slice_major",
    "max_ranks",
    "require_positive",
    "row_digits",
    "scaled_cores",
    "slice_major",
    "slice_major_stride",
    "tt_cost",
    "tt_svd",
    "tt_svd_spectra",
    "tt_to_dense",
]
