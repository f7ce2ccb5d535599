"""Embedding bag over a TT table.

Shapes: L ids, B bags, U unique ids of the batch, N embedding_dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from comera_rec.nn.tracing import one_call_in_fx
from comera_rec.nn.tt_table import TTTable
from comera_rec.ops import tt_bags
from comera_rec.ops.bags import MODES
from comera_rec.tt import TTShape
from data_pipeline.errors import UserError


class TTEmbeddingBag(TTTable):
    """`torch.nn.EmbeddingBag` over a TT table.

    E[i, (j_1..j_d)] = G_1[0, i_1, j_1, :] diag(D_1) G_2[:, i_2, j_2, :] ... G_d[:, i_d, j_d, 0]  (+ A[i] diag(D) P)

    Each unique id of a batch is looked up once, each unique tuple of leading or trailing digits is contracted once, and bags are
    pooled from these rows: memory grows with unique ids, not with lookups. CoMERA, sections 3.1 and 4.1 (arXiv 2405.14377).

    Args:
        num_embeddings: rows M of the table.
        embedding_dim: columns N.
        shape: modes and ranks; default `TTShape.for_table(num_embeddings, embedding_dim, tt_ranks=tt_ranks)`.
        tt_ranks: one rank for all bonds, or one for each; default 16. Give at most one of `shape` and `tt_ranks`.
        hot_rows, row_order: blocks (rows, width) of the most frequent ids, and the row of each id, see `TTTable`.
        mode: "sum", "mean" or "max".
        include_last_offset: offsets end with the number of ids, as in `nn.EmbeddingBag`.
        impl: implementation of the products, see `comera_rec.ops.tt_bags`.
        std: standard deviation of the entries at initialization; default 1, that of `nn.EmbeddingBag`.
        name: the table's name in error messages.

    Raises:
        ValueError: for sizes or ranks below 1, an unknown mode, or a shape too small for the table.

    Example:
        >>> bag = TTEmbeddingBag(1_000_000, 64, tt_ranks=8)
        >>> bag(torch.tensor([3, 999_999, 3]), torch.tensor([0, 2])).shape
        torch.Size([2, 64])
    """

    _KEPT = ("mode", "include_last_offset")

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        shape: TTShape | None = None,
        tt_ranks: int | Sequence[int] | None = None,
        hot_rows: Sequence[tuple[int, int]] = (),
        row_order: Tensor | None = None,
        mode: str = "sum",
        include_last_offset: bool = False,
        impl: str = "auto",
        std: float = 1.0,
        name: str = "the table",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if mode not in MODES:
            raise UserError(f"mode is {mode!r}: choose one of {', '.join(map(repr, MODES))}")
        super().__init__(
            num_embeddings,
            embedding_dim,
            shape=shape,
            tt_ranks=tt_ranks,
            hot_rows=hot_rows,
            row_order=row_order,
            impl=impl,
            std=std,
            name=name,
            device=device,
            dtype=dtype,
        )
        self.mode = mode
        self.include_last_offset = include_last_offset

    @one_call_in_fx
    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Pool bags of rows; arguments as in `torch.nn.EmbeddingBag`.

        Args:
            input: [L] ids with `offsets`, or [B, L] ids, bags of equal length.
            offsets: [B] starts of the bags, or [B + 1] with `include_last_offset`.
            per_sample_weights: weights of the shape of `input`; mode "sum" only.

        Raises:
            ValueError: naming the table, the id and the limit, if an id is out of range (checked on CPU); for arguments of
                other shapes or types.

        Returns:
            [B, N].
        """
        if per_sample_weights is not None and per_sample_weights.shape != input.shape:
            raise UserError(
                f"per_sample_weights has shape {tuple(per_sample_weights.shape)} for ids of shape {tuple(input.shape)}: "
                "give a weight for each id, in the same shape"
            )
        return tt_bags(
            self.group(),
            self.plan(input),
            self._bag_ends(input, offsets),
            num_cols=self.embedding_dim,
            mode=self.mode,
            per_sample_weights=None if per_sample_weights is None else per_sample_weights.flatten(),
            impl=self.impl,
        )

    def _bag_ends(self, input: Tensor, offsets: Tensor | None) -> Tensor:
        """Return the [B + 1] starts of the bags and the end of the last one."""
        if input.dim() == 2 and offsets is None:
            return torch.arange(input.shape[0] + 1, device=input.device) * input.shape[1]
        if input.dim() != 1 or offsets is None:
            raise UserError(f"input has {input.dim()} dimensions: give [L] ids with offsets, or [B, L] ids without")
        if not isinstance(offsets, Tensor):
            raise UserError(f"offsets are a {type(offsets).__name__}: give a tensor")
        if offsets.dim() != 1 or offsets.dtype not in (torch.int32, torch.int64):
            raise UserError(f"offsets have dtype {offsets.dtype} and {offsets.dim()} dimensions: give [B] int32 or int64")
        return offsets if self.include_last_offset else torch.cat([offsets, offsets.new_full((1,), input.shape[0])])

    def to_dense(self) -> nn.EmbeddingBag:
        """Return a `torch.nn.EmbeddingBag` with the same rows, frozen if this table is."""
        bag = nn.EmbeddingBag(
            self.num_embeddings,
            self.embedding_dim,
            mode=self.mode,
            include_last_offset=self.include_last_offset,
            _weight=self.dense_matrix().detach().clone(memory_format=torch.contiguous_format),  # one core is its own matrix
        )
        return bag.requires_grad_(self.core_0.requires_grad)
