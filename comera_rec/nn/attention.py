"""Multi-head self-attention.

Shapes: B batch, L positions, D embed_dim, H heads of K = D / H features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera_rec.tt import require_positive
from data_pipeline.errors import UserError


class MultiheadAttention(nn.Module):
    """Self-attention, softmax(Q K^T / sqrt(K)) V in each head, by `scaled_dot_product_attention`.

    Vaswani et al., Attention Is All You Need, section 3.2 (arXiv 1706.03762).

    Args:
        embed_dim: D.
        num_heads: H, a divisor of D.
        dropout: probability of dropping an attention weight.

    Raises:
        ValueError: for sizes below 1, or a number of heads that doesn't divide `embed_dim`.
    """

    def __init__(self, embed_dim: int, num_heads: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        require_positive(embed_dim=embed_dim, num_heads=num_heads)
        if embed_dim % num_heads:
            raise UserError(f"num_heads is {num_heads}, which does not divide embed_dim {embed_dim}: choose one of its divisors")
        self.num_heads = num_heads
        self.dropout = dropout
        self.query = nn.Linear(embed_dim, embed_dim)
        self.key = nn.Linear(embed_dim, embed_dim)
        self.value = nn.Linear(embed_dim, embed_dim)
        self.output = nn.Linear(embed_dim, embed_dim)

    def forward(self, input: Tensor, *, key_padding_mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """Attend over the positions of each sequence.

        Args:
            input: [B, L, D].
            key_padding_mask: [B, L] bool, True where a position is padding, which no position attends to, as in
                `torch.nn.MultiheadAttention`. For a sequence of only padding, the output is the output layer's bias.
            causal: positions attend only to themselves and those before them.

        Returns:
            [B, L, D].
        """
        query_BHLK, key_BHLK, value_BHLK = (
            projection(input).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        visible = None if key_padding_mask is None else ~key_padding_mask[:, None, None, :]
        if visible is not None and causal:
            length = input.shape[1]
            visible = visible & torch.ones(length, length, dtype=torch.bool, device=input.device).tril()
        mixed_BHLK = F.scaled_dot_product_attention(
            query_BHLK,
            key_BHLK,
            value_BHLK,
            attn_mask=visible,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=causal and visible is None,
        )
        mixed: Tensor = self.output(mixed_BHLK.transpose(1, 2).flatten(2))
        return mixed
