"""Transformer encoders, whose linear layers `comera_rec.compress_` compresses, over a dense or a TT embedding, and output layers.

Shapes: B batch, L positions, D embed_dim, H heads of K = D / H features, F ff_dim, C classes, V vocab_size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera_rec.nn.embedding import TTEmbedding
from comera_rec.tt import require_positive
from data_pipeline.errors import UserError

EmbeddingFactory = Callable[[int, int], nn.Embedding | TTEmbedding]
"""(num_embeddings, embedding_dim) -> a layer from ids [...] to rows [..., embedding_dim], such as `nn.Embedding`."""

EMBEDDING_STD = 0.02
"""Standard deviation of the rows of embeddings: as in BERT, small enough that scores against them start near zero."""


def dense_embedding(num_embeddings: int, embedding_dim: int) -> nn.Embedding:
    """Make an `nn.Embedding` whose rows are drawn with `EMBEDDING_STD`."""
    embedding = nn.Embedding(num_embeddings, embedding_dim)
    nn.init.normal_(embedding.weight, std=EMBEDDING_STD)
    return embedding


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Sizes of an encoder; the defaults are those of CoMERA's six-encoder model (section 5.1, arXiv 2405.14377).

    Attributes:
        vocab_size: rows of the token embedding.
        embed_dim: features D of a position.
        num_layers: encoder blocks.
        num_heads: attention heads of a block.
        ff_dim: hidden features F of a block's feed-forward network.
        max_length: the most positions L, rows of the position embedding.
        norm_first: normalize before attention and feed-forward instead of after them, and once more at the end.
        causal: positions attend only to themselves and those before them.
        dropout: probability of dropping a feature or an attention weight.

    Raises:
        ValueError: for sizes below 1, or a dropout that is not a probability.
    """

    vocab_size: int = 30_522
    embed_dim: int = 768
    num_layers: int = 6
    num_heads: int = 12
    ff_dim: int = 3072
    max_length: int = 128
    norm_first: bool = False
    causal: bool = False
    dropout: float = 0.1

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "embed_dim", "num_layers", "num_heads", "ff_dim", "max_length")
        require_positive(**{name: getattr(self, name) for name in sizes})
        if not 0 <= self.dropout < 1:
            raise UserError(f"dropout is {self.dropout}: give a probability from 0 to below 1")


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


class FeedForward(nn.Module):
    """Two linear layers with a GELU between them, applied to each position separately.

    Args:
        embed_dim: D.
        ff_dim: F.
        dropout: probability of dropping a hidden feature.
    """

    def __init__(self, embed_dim: int, ff_dim: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.expand = nn.Linear(embed_dim, ff_dim)
        self.contract = nn.Linear(ff_dim, embed_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, input: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        output: Tensor = self.contract(self.dropout(F.gelu(self.expand(input))))
        return output


class EncoderBlock(nn.Module):
    """Self-attention, then feed-forward, each with a residual connection and layer normalization.

    Computes what `torch.nn.TransformerEncoderLayer` with `batch_first` and GELU does. Vaswani et al., section 3.1
    (arXiv 1706.03762); pre-norm as in Xiong et al. (arXiv 2002.04745).

    Args:
        embed_dim, num_heads: sizes D and H of the attention.
        ff_dim: hidden features F of the feed-forward network.
        dropout: probability of dropping a feature, inside and after both parts.
        norm_first: pre-norm, x + f(norm(x)), instead of post-norm, norm(x + f(x)).

    Example:
        >>> block = EncoderBlock(64, 4, 256)
        >>> block(torch.zeros(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    def __init__(self, embed_dim: int, num_heads: int, ff_dim: int, *, dropout: float = 0.0, norm_first: bool = False) -> None:
        super().__init__()
        self.attention = MultiheadAttention(embed_dim, num_heads, dropout=dropout)
        self.feed_forward = FeedForward(embed_dim, ff_dim, dropout=dropout)
        self.attention_norm = nn.LayerNorm(embed_dim)
        self.feed_forward_norm = nn.LayerNorm(embed_dim)
        self.dropout = nn.Dropout(dropout)
        self.norm_first = norm_first

    def forward(self, input: Tensor, *, key_padding_mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """[B, L, D] -> [B, L, D]; masks as in `MultiheadAttention`."""
        attend = partial(self.attention, key_padding_mask=key_padding_mask, causal=causal)
        if self.norm_first:
            x_BLD = input + self.dropout(attend(self.attention_norm(input)))
            return x_BLD + self.dropout(self.feed_forward(self.feed_forward_norm(x_BLD)))
        x_BLD = self.attention_norm(input + self.dropout(attend(input)))
        output: Tensor = self.feed_forward_norm(x_BLD + self.dropout(self.feed_forward(x_BLD)))
        return output


class TransformerEncoder(nn.Module):
    """Token ids to hidden states: token and position embeddings, then encoder blocks.

    Args:
        config: sizes.
        embedding: makes the token embedding, e.g. `partial(TTEmbedding, shape=..., std=EMBEDDING_STD)`. The position
            embedding is small and stays dense.

    Example:
        >>> encoder = TransformerEncoder(TransformerConfig(vocab_size=100, embed_dim=64, num_layers=2, num_heads=4, ff_dim=128))
        >>> encoder(torch.tensor([[5, 99, 7]])).shape
        torch.Size([1, 3, 64])
    """

    def __init__(self, config: TransformerConfig, *, embedding: EmbeddingFactory = dense_embedding) -> None:
        super().__init__()
        self.config = config
        self.tokens = embedding(config.vocab_size, config.embed_dim)
        self.positions = dense_embedding(config.max_length, config.embed_dim)
        self.embedding_norm = nn.LayerNorm(config.embed_dim)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            EncoderBlock(config.embed_dim, config.num_heads, config.ff_dim, dropout=config.dropout, norm_first=config.norm_first)
            for _ in range(config.num_layers)
        )
        self.final_norm = nn.LayerNorm(config.embed_dim) if config.norm_first else None

    def forward(self, ids: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Encode token ids.

        Args:
            ids: [B, L] token ids.
            key_padding_mask: [B, L] bool, True where a position is padding.

        Raises:
            ValueError: for more positions than `config.max_length`.

        Returns:
            [B, L, D]; undefined at padding positions.
        """
        length = ids.shape[1]
        if length > self.config.max_length:
            limit = self.config.max_length
            raise UserError(f"ids have {length} positions but max_length is {limit}: truncate the ids or raise max_length")
        x_BLD = self.tokens(ids) + self.positions(torch.arange(length, device=ids.device))
        x_BLD = self.dropout(self.embedding_norm(x_BLD))
        for block in self.blocks:
            x_BLD = block(x_BLD, key_padding_mask=key_padding_mask, causal=self.config.causal)
        return x_BLD if self.final_norm is None else self.final_norm(x_BLD)


class ClassificationHead(nn.Module):
    """Scores of classes from the hidden state of the first position, as in BERT (Devlin et al., arXiv 1810.04805).

    Args:
        embed_dim: D.
        num_classes: C.
        dropout: probability of dropping a hidden feature.
    """

    def __init__(self, embed_dim: int, num_classes: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.hidden = nn.Linear(embed_dim, embed_dim)
        self.dropout = nn.Dropout(dropout)
        self.classes = nn.Linear(embed_dim, num_classes)

    def forward(self, input: Tensor) -> Tensor:
        """[B, L, D] -> [B, C]."""
        scores: Tensor = self.classes(self.dropout(self.hidden(input[:, 0]).tanh()))
        return scores


class TiedProjection(nn.Module):
    """Scores of all tokens, x E^T + b, where E is the table of the token embedding (Press and Wolf, arXiv 1608.05859).

    Args:
        embedding: `nn.Embedding`, or `TTEmbedding`, see its `logits`. It is shared, not copied.
    """

    def __init__(self, embedding: nn.Embedding | TTEmbedding) -> None:
        super().__init__()
        self.embedding = embedding
        parameter = next(embedding.parameters())
        self.bias = nn.Parameter(parameter.new_zeros(embedding.num_embeddings))

    def forward(self, input: Tensor) -> Tensor:
        """[..., D] -> [..., V]."""
        if isinstance(self.embedding, nn.Embedding):
            return F.linear(input, self.embedding.weight, self.bias)
        return self.embedding.logits(input) + self.bias


class LanguageModelHead(nn.Module):
    """Scores of all tokens from hidden states: a hidden layer, GELU and layer normalization, then the projection, as in BERT.

    Args:
        embed_dim: D.
        projection: [..., D] -> [..., V]: `TiedProjection(encoder.tokens)`, or a separate layer such as `TTLinear(D, V)`.
    """

    def __init__(self, embed_dim: int, projection: nn.Module) -> None:
        super().__init__()
        self.hidden = nn.Linear(embed_dim, embed_dim)
        self.norm = nn.LayerNorm(embed_dim)
        self.projection = projection

    def forward(self, input: Tensor) -> Tensor:
        """[..., D] -> [..., V]."""
        scores: Tensor = self.projection(self.norm(F.gelu(self.hidden(input))))
        return scores
