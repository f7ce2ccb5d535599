"""What tensor-train tables share, whether their rows are pooled or not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from comera_rec.nn.tt_module import TTModule
from comera_rec.ops.gathered_matmul import require_impl
from comera_rec.tt import TTShape, require_positive


class TTTable(TTModule):
    """An embedding table held as a tensor-train matrix.

    E[i, (j_1..j_d)] = G_1[0, i_1, j_1, :] diag(D_1) G_2[:, i_2, j_2, :] ... G_d[:, i_d, j_d, 0]

    Args:
        num_embeddings: rows M of the table.
        embedding_dim: columns N.
        shape: modes and ranks; default `TTShape.for_table(num_embeddings, embedding_dim, tt_ranks=tt_ranks)`.
        tt_ranks: ranks, one for all bonds or one each; default 16. Give at most one of `shape` and `tt_ranks`.
        impl: implementation of the products, see `comera_rec.ops.gathered_matmul`.
        std: standard deviation of the entries at initialization.
        name: the table's name in error messages.

    Raises:
        ValueError: for sizes or ranks below 1, a shape too small for the table.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        shape: TTShape | None = None,
        tt_ranks: int | Sequence[int] | None = None,
        impl: str = "auto",
        std: float = 1.0,
        name: str = "the table",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        require_positive(num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        require_impl(impl)
        shape = table_shape(num_embeddings, embedding_dim, shape, tt_ranks)
        super().__init__(num_embeddings, embedding_dim, shape, std, device=device, dtype=dtype)
        self.impl = impl
        self.name = name
        self.reset_parameters()

    @property
    def num_embeddings(self) -> int:
        """Rows M of the table."""
        return self.num_rows

    @property
    def embedding_dim(self) -> int:
        """Columns N of the table."""
        return self.num_cols


def table_shape(num_embeddings: int, embedding_dim: int, shape: TTShape | None, tt_ranks: int | Sequence[int] | None) -> TTShape:
    """The shape given, or the default one of a table at the given ranks; both is a ValueError."""
    if shape is not None and tt_ranks is not None:
        raise ValueError(f"shape {shape} and tt_ranks {tt_ranks} are both given: give one of them")
    return shape or TTShape.for_table(num_embeddings, embedding_dim, tt_ranks=tt_ranks)


def require_plain_rows(module: nn.Embedding | nn.EmbeddingBag) -> None:
    """Raise a ValueError if a dense table treats some rows in a way that a train can't honour."""
    if module.padding_idx is not None or module.max_norm is not None or module.scale_grad_by_freq:
        raise ValueError(
            "padding_idx, max_norm and scale_grad_by_freq have no tensor-train equivalent: "
            f"build the {type(module).__name__} without them"
        )
