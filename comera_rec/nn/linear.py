"""Linear layer whose weight is a TT matrix.

Shapes: B rows of the input, I in_features, O out_features, r the rank of the bond between input and output modes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from comera_rec.nn.tracing import one_call_in_fx
from comera_rec.nn.tt_module import TTModule, std_of
from comera_rec.ops import tt_linear
from comera_rec.ops.autocast import is_autocast_on
from comera_rec.ops.bags.updates import require_averaged
from comera_rec.tt import TTShape, require_positive
from data_pipeline.errors import UserError


class TTLinear(TTModule):
    """`torch.nn.Linear` whose weight is a TT matrix with cores for input modes, then for output modes.

    y = x W + b = (x L) R + b, with L (I x r) contracted from the input cores and R (r x O) from the output cores once per step
    (CoMERA, section 4.2, arXiv 2405.14377).

    Args:
        in_features: size of the last dimension of the input.
        out_features: size of the last dimension of the output.
        bias: learn an additive bias.
        shape: modes and ranks, input modes (n_k = 1) before output modes (m_k = 1); default
            `TTShape.for_linear(in_features, out_features, tt_ranks=tt_ranks)`.
        tt_ranks: one rank for all bonds (where modes allow less, the largest they allow), or one for each; default 16. Give at most
            one of `shape` and `tt_ranks`.
        std: standard deviation of the dense weight's entries at the start; default that of `nn.Linear`.

    Raises:
        ValueError: for sizes or ranks below 1, or a shape that is too small or mixes input and output modes.

    Example:
        >>> TTLinear(512, 256, tt_ranks=16)(torch.zeros(4, 7, 512)).shape
        torch.Size([4, 7, 256])
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        shape: TTShape | None = None,
        tt_ranks: int | Sequence[int] | None = None,
        std: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        require_positive(in_features=in_features, out_features=out_features)
        if shape is not None and tt_ranks is not None:
            raise UserError(f"shape {shape} and tt_ranks {tt_ranks} are both given: give one of them")
        shape = shape or TTShape.for_linear(in_features, out_features, tt_ranks=tt_ranks)
        self._num_input_modes = shape.num_input_modes
        std = (3 * in_features) ** -0.5 if std is None else std  # that of nn.Linear: uniform on +-1/sqrt(in_features)
        super().__init__(in_features, out_features, shape, std, device=device, dtype=dtype)
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw cores and bias with the standard deviation that `nn.Linear` would give."""
        super().reset_parameters()
        if self.bias is not None and not self.bias.is_meta:
            nn.init.uniform_(self.bias, -(self.in_features**-0.5), self.in_features**-0.5)

    @property
    def shape(self) -> TTShape:
        """Modes and ranks of the parameters, shared by the layers that share these."""
        return self._shapes[0]

    @shape.setter
    def shape(self, shape: TTShape) -> None:
        if "_shapes" not in self.__dict__:
            self._shapes = [shape]
        self._shapes[0] = shape

    def tie_weight_(self, other: "TTLinear") -> None:
        """Share the cores and rank parameters of another layer of the same shape, even when their ranks change."""
        assert self.shape == other.shape
        for name, parameter in other.named_parameters(recurse=False):
            if name != "bias":
                self.register_parameter(name, parameter)
        self._shapes = other._shapes

    @property
    def in_features(self) -> int:
        """Size of the last dimension of the input."""
        return self.num_rows

    @property
    def out_features(self) -> int:
        """Size of the last dimension of the output."""
        return self.num_cols

    @property
    def weight(self) -> Tensor:
        """The dense weight [out_features, in_features], formed at every access.

        For code that reads a layer's weight instead of calling it.
        """
        return self.dense_matrix().mT

    @one_call_in_fx
    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features].

        Raises:
            ValueError: for an input with another number of features, or of another type than the parameters; autocast converts
                floats.
        """
        if input.shape[-1] != self.in_features:
            raise UserError(f"input has {input.shape[-1]} features and the layer takes {self.in_features}: give [..., in_features]")
        cores = self.cores()
        if input.dtype != cores[0].dtype and not (input.is_floating_point() and is_autocast_on(input.device)):
            raise UserError(f"input is {input.dtype} and the layer {cores[0].dtype}: give one type, or floats under torch.autocast")
        if not torch.compiler.is_compiling():
            require_averaged(cores)
        return tt_linear(input, cores, self.rank_parameters(), self._num_input_modes, self.out_features, self.bias)

    @classmethod
    def from_dense(
        cls, module: nn.Linear, *, shape: TTShape | None = None, tt_ranks: int | Sequence[int] | None = None, rtol: float = 0.0
    ) -> "TTLinear":
        """Return the TT-SVD of a dense linear layer with a copy of its bias; see `comera_rec.tt.tt_svd`."""
        layer = cls.like(module, shape=shape, tt_ranks=tt_ranks)
        layer.set_dense_matrix_(module.weight.detach().mT, rtol=rtol)
        if layer.bias is not None:
            layer.bias.data.copy_(module.bias.detach())
        return layer

    @classmethod
    def like(cls, module: nn.Linear, **sizes: Any) -> "TTLinear":
        """Return a random layer of a dense layer's features, standard deviation, device and dtype; `sizes`: shape or tt_ranks."""
        weight: Tensor = module.weight
        has_bias, std = module.bias is not None, std_of(weight)
        return cls(module.in_features, module.out_features, has_bias, **sizes, std=std, device=weight.device, dtype=weight.dtype)

    def to_dense(self) -> nn.Linear:
        """Return a `torch.nn.Linear` with the same weight and bias, frozen where this layer is."""
        layer = nn.Linear(
            self.in_features, self.out_features, self.bias is not None, device=self.core_0.device, dtype=self.core_0.dtype
        )
        with torch.no_grad():
            layer.weight.copy_(self.weight)
            if self.bias is not None:
                layer.bias.copy_(self.bias)
                layer.bias.requires_grad_(self.bias.requires_grad)
        layer.weight.requires_grad_(self.core_0.requires_grad)
        return layer
