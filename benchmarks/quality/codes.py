"""Tables stored as codes: an id has several codes, each selects a vector of a codebook, and the vectors form the id's row.

B batch, M rows and N columns of a table, D codes per id, K vectors per codebook, n = N / D numbers per vector.

    CCE         four codes, initially hashes, and four further hashes into separate codebooks; each quarter of a row is the sum of
                two vectors. After a quarter and a half of the steps, K-means reduces these sums to K vectors, an id's code becomes
                the nearest one, and the further hashes are redrawn with zero codebooks. Tsang and Ahle, arXiv 2210.05974. As in the
                paper, the budget covers only codebooks; `index_bytes` has the codes, which are larger at high compression
    MGQE        codes of the vectors nearest to a dense table's row, trained with a straight-through estimator; the most frequent
                tenth of the ids may use all K vectors, the others only the first ones. D and both numbers of vectors fill the
                budget best, codes included. Predictions don't need the dense table. Kang et al., arXiv 2002.08530
"""

from __future__ import annotations

from math import ceil, log2
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.quality.tables import STD, Table, hashed


class Clustered(Table):
    """CCE: codes come from hashing first, then from clustering the trained rows."""

    parts = 4
    codes_MD: Tensor  # noqa: N815  shapes

    def __init__(self, counts: Tensor, dim: int, budget: int, std: float = STD) -> None:
        super().__init__()
        self.size = budget // (2 * dim)
        shape = (self.parts * self.size, dim // self.parts)
        self.clustered, self.hashed = (nn.Parameter(std * 2**-0.5 * torch.randn(shape)) for _ in range(2))
        self.register_buffer("codes_MD", self._hashes(torch.arange(len(counts)), 0))
        self.clusterings = 0

    @classmethod
    def least(cls, rows: int, dim: int) -> int:
        return 2 * dim

    def _hashes(self, ids: Tensor, draw: int) -> Tensor:
        parts = range(self.parts)
        return torch.stack([hashed(ids, self.parts * draw + part) % self.size + part * self.size for part in parts], dim=1)

    def forward(self, ids: Tensor) -> Tensor:
        clustered_BDn = F.embedding(self.codes_MD[ids], self.clustered)
        hashed_BDn = F.embedding(self._hashes(ids, 1 + self.clusterings), self.hashed)
        return (clustered_BDn + hashed_BDn).flatten(1)

    def num_bytes(self) -> tuple[float, float]:
        """See the base class; codes before the first clustering are hashes, which need no bytes."""
        return super().num_bytes()[0], self.codes_MD.numel() * ceil(log2(self.size)) / 8 if self.clusterings else 0

    @torch.no_grad()
    def cluster_(self) -> None:
        """Give ids with similar rows the same code."""
        rows_MDn = self(torch.arange(len(self.codes_MD))).unflatten(1, (self.parts, -1))
        for part in range(self.parts):
            vectors, codes = k_means(rows_MDn[:, part], self.size)
            self.clustered[part * self.size :][: self.size] = vectors
            self.codes_MD[:, part] = codes + part * self.size
        self.hashed.zero_()
        self.clusterings += 1


def k_means(points: Tensor, clusters: int, rounds: int = 5) -> tuple[Tensor, Tensor]:
    """Run Lloyd's algorithm from random points; return vectors [clusters, n] and the index of each point's nearest vector."""
    vectors = points[torch.randperm(len(points))[:clusters]].clone()
    for _ in range(rounds):
        nearest = _nearest(points, vectors)
        members = torch.bincount(nearest, minlength=clusters)
        sums = torch.zeros_like(vectors).index_add_(0, nearest, points)
        vectors = torch.where(members[:, None] > 0, sums / members.clamp(min=1)[:, None], vectors)
    return vectors, _nearest(points, vectors)


def _nearest(points: Tensor, vectors: Tensor) -> Tensor:
    norms = vectors.square().sum(1)
    parts = points.split(max(1, 2**17 // len(vectors)))  # so that distances stay in cache; NumPy's argmin is much faster
    return torch.cat([torch.from_numpy(torch.addmm(norms, part, vectors.T, alpha=-2).numpy().argmin(1)) for part in parts])


class MultiGranular(Table):
    """MGQE: product quantization of a table while it is trained, coarser for rare ids."""

    def __init__(self, counts: Tensor, dim: int, budget: int, std: float = STD) -> None:
        super().__init__()
        self.rows, self.dim = len(counts), dim
        self.head = ceil(self.rows / 10)
        choices = [(2**d, 2**k, 2**t) for d in range(dim.bit_length()) for k in range(9) for t in range(max(1, k))]
        fitting = [c for c in choices if dim % c[0] == 0 and sum(self._bytes(*c)) <= 4 * budget]
        self.parts, self.size, self.tail_size = max(fitting, key=lambda c: sum(self._bytes(*c)))
        self.weight = nn.Parameter(std * torch.randn(self.rows, dim))
        self.codebooks_DKn = nn.Parameter(std * torch.randn(self.parts, self.size, dim // self.parts))

    def _bytes(self, parts: int, size: int, tail_size: int) -> tuple[float, float]:
        tail = self.rows - self.head
        return 4 * size * self.dim, parts * (self.head * log2(size) + tail * log2(tail_size)) / 8

    def num_bytes(self) -> tuple[float, float]:
        """See the base class; the dense table, which only training needs, is not counted."""
        return self._bytes(self.parts, self.size, self.tail_size)

    def forward(self, ids: Tensor) -> Tensor:
        rows_DBn = F.embedding(ids, self.weight).unflatten(1, (self.parts, -1)).transpose(0, 1)
        vectors_DBn = self.codebooks_DKn[torch.arange(self.parts)[:, None], self._codes(ids)]
        quantized_DBn: Tensor = _StraightThrough.apply(rows_DBn, vectors_DBn)
        return quantized_DBn.transpose(0, 1).flatten(1)

    @torch.no_grad()
    def _codes(self, ids: Tensor) -> Tensor:
        """Find the vectors nearest to the parts of rows, [D, B]."""
        ids, inverse = ids.unique(return_inverse=True)  # ascending, so the most frequent ids come first
        rows_DUn = F.embedding(ids, self.weight).unflatten(1, (self.parts, -1)).transpose(0, 1)
        heads = int((ids < self.head).sum())
        codes_DU = torch.stack(
            [
                torch.cat([_nearest(rows_Un[:heads], vectors_Kn), _nearest(rows_Un[heads:], vectors_Kn[: self.tail_size])])
                for rows_Un, vectors_Kn in zip(rows_DUn, self.codebooks_DKn, strict=True)
            ]
        )
        return codes_DU[:, inverse]


class _StraightThrough(torch.autograd.Function):
    """Replaces rows r by vectors v, both [D, B, n]; both receive the gradient, and a penalty pulls them toward each other.

    The penalty, |v - sg(r)|^2 + |r - sg(v)|^2 / 4, is a mean over the batch, as the loss is (van den Oord et al., arXiv 1711.00937,
    equation 3).
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, vectors: Tensor) -> Tensor:
        ctx.save_for_backward(rows - vectors)
        return vectors.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (apart,) = ctx.saved_tensors
        pull = 2 * apart / apart.shape[1]
        return grad + pull / 4, grad - pull
