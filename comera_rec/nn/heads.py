"""Output layers of a transformer: scores of classes, or of all tokens.

Shapes: B batch, L positions, D embed_dim, C classes, V vocab_size.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from comera_rec.nn.embedding import TTEmbedding


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
        if isinstance(self.embedding, TTEmbedding):
            return self.embedding.logits(input) + self.bias
        return F.linear(input, self.embedding.weight, self.bias)


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
