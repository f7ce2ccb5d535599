"""`tt_linear` by definition: x W + b with the whole matrix formed."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from comera_rec.tt import contract


def tt_linear(x: Tensor, cores: Sequence[Tensor], diagonals: Sequence[Tensor], out_features: int, bias: Tensor | None) -> Tensor:
    """Map [..., I] to [..., O] by the matrix [I, O] that is G_1 diag(D_1) G_2 ... G_d without its padding."""
    scaled = [cores[0], *(diagonal.view(-1, 1, 1, 1) * core for diagonal, core in zip(diagonals, cores[1:], strict=True))]
    matrix_MN = contract(scaled)[0, :, :, 0]
    return F.linear(x, matrix_MN[: x.shape[-1], :out_features].mT, bias)
