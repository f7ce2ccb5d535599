"""`tt_linear`: rows times a TT matrix, by two matrices formed from its cores.

Shapes: I in_features, O out_features, r the rank of the bond between input and output modes.
"""

import math
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from comera_rec.tt import contract, scaled_cores


def tt_linear(
    x: Tensor, cores: Sequence[Tensor], diagonals: Sequence[Tensor], num_input_modes: int, out_features: int, bias: Tensor | None
) -> Tensor:
    """Return y = x W + b = (x L) R + b with W = G_1 diag(D_1) G_2 ... G_d; CoMERA, section 4.2 (arXiv 2405.14377).

    L [I, r] is formed from the cores of input modes, R [r, O] from those of output modes. These are plain matrix products, which
    autograd, autocast, torch.compile and torch.export support. Autograd keeps x, L, R and x L: only the output has O columns.

    Args:
        x: [..., I], I at most m_1...m_d.
        cores: (r, m, n, s) each, all input modes before all output modes.
        diagonals: (r) or (r, 1) each, between neighboring cores.
        num_input_modes: how many of the cores are of input modes.
        out_features: O, at most n_1...n_d.
        bias: [O], or None.

    Returns:
        [..., O].
    """
    scaled = scaled_cores(cores, diagonals)
    left, right = scaled[:num_input_modes], scaled[num_input_modes:]
    rank = right[0].shape[0]
    left_Ir = contract(left).reshape(math.prod([core.shape[1] for core in left]), rank)[: x.shape[-1]]
    right_rO = contract(right).reshape(rank, math.prod([core.shape[2] for core in right]))[:, :out_features]
    return F.linear(F.linear(x, left_Ir.mT), right_rO.mT, bias)
