"""Token embedding over a TT table, and the scores of all its tokens.

Shapes: M num_embeddings, N embedding_dim, T tokens; the table's left part has M1 rows and N1 columns, its right part M2 and N2, and
r is the rank of the bond between them.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera_rec.nn.tracing import one_call_in_fx
from comera_rec.nn.tt_table import TTTable
from comera_rec.ops import tt_bags
from comera_rec.tt import TTShape, contract
from data_pipeline.errors import UserError

_WRITE = 100  # multiply-adds that take as long as one number of an intermediate result takes to be written and read


class TTEmbedding(TTTable):
    """`torch.nn.Embedding` over a TT table.

    Each unique token of a batch is looked up once, as in `TTEmbeddingBag`. CoMERA, section 4.1 (arXiv 2405.14377).

    Args:
        padding_idx: id whose row is zero and gets no gradient, as in `nn.Embedding`; `logits` ignores it.
        num_embeddings, embedding_dim, others: see `TTEmbeddingBag`.

    Raises:
        ValueError: as `TTTable`; for a padding index that is not an id.

    Example:
        >>> embedding = TTEmbedding(30_522, 768, shape=TTShape((16, 20, 10, 10), (4, 4, 8, 6), 32))
        >>> tokens = embedding(torch.tensor([[101, 7592, 102]]))
        >>> tokens.shape, embedding.logits(tokens).shape
        (torch.Size([1, 3, 768]), torch.Size([1, 3, 30522]))
    """

    _KEPT = ("padding_idx",)

    def __init__(self, num_embeddings: int, embedding_dim: int, *, padding_idx: int | None = None, **others: Any) -> None:
        super().__init__(num_embeddings, embedding_dim, **others)
        if padding_idx is not None and not 0 <= padding_idx < num_embeddings:
            raise UserError(f"padding_idx is {padding_idx}: give an id from 0 to {num_embeddings - 1}")
        self.padding_idx = padding_idx

    @one_call_in_fx
    def forward(self, input: Tensor) -> Tensor:
        """Look up ids of any shape [...]; returns rows [..., N].

        Raises:
            ValueError: naming the id and the limit, if an id is out of range (checked on CPU).
        """
        plan, ends = self.plan(input), torch.arange(input.numel() + 1, device=input.device)  # bags of one id
        rows_TN = tt_bags(self.group(), plan, ends, num_cols=self.embedding_dim, impl=self.impl)
        rows = rows_TN.view(*input.shape, self.embedding_dim)
        return rows if self.padding_idx is None else rows.masked_fill((input == self.padding_idx).unsqueeze(-1), 0)

    def logits(self, input: Tensor) -> Tensor:
        """Return the inner products with all rows, x E^T: an output layer tied to the table.

        x is contracted with one part of the cores, then with the other; the cut between the parts and their order are those
        that cost least. Where forming E costs less, as for many tokens and a small table, it is formed.

        Args:
            input: [..., N].

        Returns:
            [..., M]; 0 for `padding_idx`, whose row is zero.
        """
        if input.shape[-1:] != (self.embedding_dim,):
            raise UserError(f"input has shape {tuple(input.shape)}: give [..., {self.embedding_dim}], a number for each column")
        return self._without_padding(self._all_logits(input), -1)

    def _all_logits(self, input: Tensor) -> Tensor:
        tokens = math.prod(input.shape[:-1])
        # A symbolic number of tokens, as torch.export has, must not decide; Dynamo takes it for an int.
        is_known = isinstance(tokens, int) and not torch.compiler.is_exporting()
        if self.shape.order == 1 or (is_known and forming_is_cheaper(self.shape, tokens)):
            return input @ self.dense_matrix().mT
        cut, right_first, _ = logits_path(self.shape)
        rank, cores = self.shape.bonds[cut], self.scaled_cores()
        rows, cols = self.shape.row_shape, self.shape.col_shape
        m2, n1, n2 = math.prod(rows[cut:]), math.prod(cols[:cut]), math.prod(cols[cut:])
        m1 = -(-self.num_embeddings // m2)  # without the rows of the left part that are padding
        left_M1N1r = contract(cores[:cut]).reshape(math.prod(rows[:cut]), n1, rank)[:m1]
        right_rM2N2 = contract(cores[cut:]).reshape(rank, m2, n2)
        x_TN1N2 = F.pad(input, (0, n1 * n2 - self.embedding_dim)).reshape(tokens, n1, n2)
        if right_first:
            half = x_TN1N2 @ right_rM2N2.reshape(rank * m2, n2).mT
            scores = left_M1N1r.reshape(m1, n1 * rank) @ half.view(tokens, n1 * rank, m2)
        else:
            half = x_TN1N2.mT.reshape(tokens * n2, n1) @ left_M1N1r.transpose(0, 1).reshape(n1, m1 * rank)
            half = half.view(tokens, n2, m1, rank).transpose(1, 2).reshape(tokens * m1, n2 * rank)
            scores = half @ right_rM2N2.permute(2, 0, 1).reshape(n2 * rank, m2)
        scores = scores.reshape(*input.shape[:-1], m1 * m2)[..., : self.num_embeddings]
        if self.num_hot_rows:
            hot_scores = [
                (input @ block.core_1[:, 0, :, 0].mT * block.rank_1[:, 0]) @ block.core_0[0, :, 0].mT for block in self.hot_blocks()
            ]
            scores = scores + F.pad(torch.cat(hot_scores, dim=-1), (0, self.num_embeddings - self.num_hot_rows))
        return scores if self.lookup_order is None else scores[..., self.lookup_order]

    def dense_matrix(self) -> Tensor:
        """Return the rows of all ids, [num_rows, num_cols]; differentiable. That of `padding_idx` is zero."""
        return self._without_padding(super().dense_matrix(), 0)

    def _without_padding(self, values: Tensor, dim: int) -> Tensor:
        """Set the values of `padding_idx` among those of all ids to zero."""
        if self.padding_idx is None:
            return values
        is_padding = torch.arange(values.shape[dim], device=values.device) == self.padding_idx
        return values.masked_fill(is_padding if dim == -1 else is_padding[:, None], 0)

    def to_dense(self) -> nn.Embedding:
        """Return a `torch.nn.Embedding` with the same rows, frozen if this table is."""
        rows = self.dense_matrix().detach().clone(memory_format=torch.contiguous_format)  # one core is its own matrix
        return nn.Embedding.from_pretrained(rows, freeze=not self.core_0.requires_grad, padding_idx=self.padding_idx)


def logits_path(shape: TTShape) -> tuple[int, bool, int]:
    """Find the cheapest way to multiply a vector of N columns by all rows of a table of two or more cores.

    Returns:
        (number of cores in the left part, whether the right part is contracted first, cost per token in multiply-adds).
    """
    paths = []
    for cut in range(1, shape.order):
        (m1, m2), (n1, n2) = ((math.prod(modes[:cut]), math.prod(modes[cut:])) for modes in (shape.row_shape, shape.col_shape))
        rank = shape.bonds[cut]
        paths.append((cut, True, n1 * rank * m2 * (n2 + m1 + _WRITE)))
        paths.append((cut, False, m1 * rank * n2 * (n1 + m2 + _WRITE)))
    return min(paths, key=lambda path: path[2])


def forming_is_cheaper(shape: TTShape, tokens: int) -> bool:
    """Return whether forming a table and multiplying by it costs less than `logits_path`, for `tokens` tokens."""
    slices = [m * n for m, n in zip(shape.row_shape, shape.col_shape, strict=True)]
    forming = sum(math.prod(slices[: k + 1]) * shape.bonds[k] * shape.bonds[k + 1] for k in range(1, shape.order))
    return forming + (_WRITE + tokens) * math.prod(slices) < tokens * logits_path(shape)[2]
