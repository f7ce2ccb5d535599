"""Tables of two bytes or one byte per number, as models are served: more bfloat16 or int8 numbers fit into a budget.

bfloat16 tables are rounded after every step of training, up or down at random in proportion to the distance, so that small steps
are not lost (stochastic rounding). int8 tables are rounded once, after training, with a scale for each row that a lookup reads:
rows of matrices, slices of TT cores. Neither rounds parameters without rows: rank parameters, and cores of one slice.
"""

from collections.abc import Iterator

import fbgemm_gpu  # noqa: F401  registers its operators
import torch
from torch import Tensor, nn

from comera_rec.ops.served_bags.storage import least_type, quantize, row_bytes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
METHODS = ("TT + rows", "TT fixed", "hashing", "CAFE", "QR", "QR in parts", "low rank", "mixed dim", "neighbors")
"""Methods that predict from the parameters that they train, all of which have rows."""
BITS = {"dense int8": 8, "dense int4": 4, "dense int2": 2}
"""Dense tables rounded after training, as FBGEMM stores quantized tables, by bits per number."""


def stored_bytes(tables: nn.Module, dtype: torch.dtype) -> int:
    """Bytes of tables stored in this type."""
    rows = sum(len(rows) * row_bytes(rows.shape[1], least_type(rows.shape[1], dtype)) for rows, _ in _rows(tables))
    others = sum(p.numel() for p in tables.parameters()) - sum(rows.numel() for rows, _ in _rows(tables))
    return rows + 4 * others


@torch.no_grad()
def round_(tables: nn.Module, dtype: torch.dtype) -> None:
    """Round tables to int8 with scales, as they are stored."""
    for rows, parameter in _rows(tables):
        numbers, scales = quantize(rows, least_type(rows.shape[1], dtype))
        rounded = numbers.float() if scales is None else numbers.float() * scales[:, None]
        _by_row(parameter).copy_(rounded.view_as(_by_row(parameter)))


@torch.no_grad()
def round_dense_(weight: Tensor, bits: int) -> int:
    """Round the rows of a dense table as FBGEMM does, each to 2^bits numbers between its least and largest; return their bytes."""
    if bits == 8:
        stored = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(weight)
        weight.copy_(torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(stored))
    else:
        stored = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(weight, bits)
        weight.copy_(torch.ops.fbgemm.FusedNBitRowwiseQuantizedSBHalfToFloat(stored, bits))
    return int(stored.nbytes)


@torch.no_grad()
def round_stochastically_(tables: nn.Module) -> None:
    """Round each number at random to one of its two bfloat16 neighbors, so that the mean over draws is the number itself."""
    for _, parameter in _rows(tables):
        bits = parameter.view(torch.int32)
        bits += torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32)
        bits &= -(1 << 16)


def _rows(tables: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield rows [n, w] of each parameter that has rows, with the parameter."""
    for parameter in tables.parameters():
        if parameter.ndim > 1 and len(_by_row(parameter)) > 1:
            yield _by_row(parameter.detach()).flatten(1), parameter


def _by_row(parameter: Tensor) -> Tensor:
    """Return a matrix as it is, a core [left, m, n, right] as [m, left, n, right]."""
    return parameter.movedim(1, 0) if parameter.ndim == 4 else parameter
