"""Ways to store an embedding table in fewer bytes, all called as ids [B] -> [B, N]. `embeddings.py` combines tables.

B batch, M rows and N columns of a table; a budget is in parameters (bytes / 4).

    hashing     M' < M rows; the id's hash selects one. Weinberger et al., arXiv 0902.2206
    ROBE        one array for a table; each quarter of a row starts at a hashed position in it. Desai et al., arXiv 2108.02191
    CAFE        separate rows for the most frequent ids, on seven tenths of the bytes, and hashing for the others. Zhang et al.,
                arXiv 2312.03256; frequencies are known from the start, whereas the paper uses a sketch of them
    QR          the elementwise product of row id // b of one table and row id % b of another. Shi et al., arXiv 1909.02107
    QR in parts the same with a table for each of at least three digits of the id, as few as fit the budget
    low rank    [M, k] times [k, N]
    mixed dim   blocks of ids by frequency f, each with a dim ~ f^0.2 to f^0.5 (what fills the budget best) and a projection; the
                rarest ids may share one vector (dim 0). Ginart et al., arXiv 1909.11810

and one that gains from an order of ids in which neighbors are similar:

    neighbors   as many neighboring ids share a row as the budget says, as clusters do in BACO (arXiv 2604.18351), CEL (2302.01478)
"""

from collections.abc import Sequence
from functools import reduce
from itertools import pairwise, product
from math import isqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STD = 0.1  # standard deviation of initial entries, unless a task has another


class DoesNotFit(Exception):
    """Raised if a method has no form within a budget."""


class Table(nn.Module):
    """Maps ids [B] to rows [B, N]; constructed as `Table(counts [M], N, budget, std)`, std that of initial entries."""

    @classmethod
    def least(cls, rows: int, dim: int) -> int:
        """The smallest possible budget."""
        return dim

    def num_bytes(self) -> tuple[float, float]:
        """Bytes of the values and of the indices that predictions need."""
        return 4 * sum(p.numel() for p in self.parameters()), 0


class Dense(Table):
    """One table, dense."""

    def __init__(self, rows: int, dim: int, std: float = STD) -> None:
        super().__init__()
        self.weight = nn.Parameter(std * torch.randn(rows, dim))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class Hashed(Dense):
    """Rows that ids with the same hash share."""

    def __init__(self, counts: Tensor, dim: int, budget: int, std: float = STD) -> None:
        super().__init__(budget // dim, dim, std)

    def forward(self, ids: Tensor) -> Tensor:
        # Fibonacci hashing, 31 bits: it spreads neighboring ids.
        return super().forward((ids * 2_654_435_769 % (1 << 32) >> 1) % len(self.weight))


def hashed(ids: Tensor, seed: int) -> Tensor:
    """Hash ids to 31 bits: multiply, fold, and multiply again (as MurmurHash3 ends)."""
    keys = (ids + seed * 7_919) * 2_246_822_519 & 0xFFFF_FFFF
    return ((keys ^ keys >> 15) * 3_266_489_917 & 0xFFFF_FFFF) >> 1


class Robe(Table):
    """Rows whose parts lie in one array."""

    def __init__(self, counts: Tensor, dim: int, budget: int, std: float = STD) -> None:
        super().__init__()
        self.part = dim // 4
        self.array = nn.Parameter(std * torch.randn(budget))

    def forward(self, ids: Tensor) -> Tensor:
        starts = torch.stack([hashed(ids, part) for part in range(4)], dim=1)[:, :, None]
        return self.array[(starts + torch.arange(self.part)) % len(self.array)].flatten(1)


class HotAndHashed(Dense):
    """Separate rows for some ids, hashing for the rest."""

    def __init__(self, counts: Tensor, dim: int, budget: int, std: float = STD) -> None:
        super().__init__(budget // dim, dim, std)
        self.rows = min(int(0.7 * budget) // dim, len(counts))

    def forward(self, ids: Tensor) -> Tensor:
        shared = self.rows + hashed(ids, 1) % (len(self.weight) - self.rows)
        return super().forward(torch.where(ids < self.rows, ids, shared))


class Digits(Table):
    """The product of rows of small tables, one for each digit of the id."""

    parts = range(3, 9)

    @classmethod
    def least(cls, rows: int, dim: int) -> int:
        return min(k * cls._base(rows, k) for k in cls.parts) * dim

    def __init__(self, counts: Tensor, dim: int, budget: int, std: float = STD) -> None:
        super().__init__()
        self.base, sizes = self._sizes(len(counts), budget // dim)
        self.tables = nn.ParameterList(std * torch.randn(size, dim) + (part > 0) for part, size in enumerate(sizes))

    def _sizes(self, rows: int, most: int) -> tuple[int, list[int]]:
        """Choose the base of the digits, and rows of tables, `most` together."""
        parts = next(k for k in self.parts if k * self._base(rows, k) <= most)
        return self._base(rows, parts), [self._base(rows, parts)] * parts

    @staticmethod
    def _base(rows: int, parts: int) -> int:
        return next(base for base in range(2, rows + 2) if base**parts >= rows)

    def forward(self, ids: Tensor) -> Tensor:
        rows = []
        for table in list(self.tables)[:-1]:  # the last digit first
            rows.append(F.embedding(ids % self.base, table))
            ids = ids // self.base
        return reduce(torch.mul, [*rows, F.embedding(ids, self.tables[-1])])


class QuotientRemainder(Digits):
    """The product of rows of two small tables."""

    @classmethod
    def least(cls, rows: int, dim: int) -> int:
        return min(b + -(-rows // b) for b in (isqrt(rows), isqrt(rows) + 1)) * dim

    def _sizes(self, rows: int, most: int) -> tuple[int, list[int]]:
        base = max((b for b in range(1, most) if b + -(-rows // b) <= most), key=lambda b: b + -(-rows // b))
        return base, [base, -(-rows // base)]


class Product(Table):
    """[M, k] times [k, N], with standard deviations of the entries of both."""

    def __init__(self, rows: int, rank: int, dim: int, left: float, right: float) -> None:
        super().__init__()
        self.left = nn.Parameter(left * torch.randn(rows, rank))
        self.right = nn.Parameter(right * torch.randn(rank, dim))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.left) @ self.right


class LowRank(Product):
    """A matrix of low rank."""

    @classmethod
    def least(cls, rows: int, dim: int) -> int:
        return rows + dim

    def __init__(self, counts: Tensor, dim: int, budget: int, std: float = STD) -> None:
        rank = budget // (len(counts) + dim)
        super().__init__(len(counts), rank, dim, *[(std / rank**0.5) ** 0.5] * 2)


class MixedDimension(Table):
    """Blocks of ids by frequency, narrower for rarer ids."""

    def __init__(self, counts: Tensor, dim: int, budget: int, std: float = STD) -> None:
        super().__init__()
        self.dim = dim
        edges = [0, *(16 * 2**k for k in range(40) if 16 * 2**k < len(counts)), len(counts)]
        self.ranges = list(pairwise(edges))
        frequency = [float(counts[a:b].double().mean()) + 1 for a, b in self.ranges]
        choices = product((0.2, 0.3, 0.4, 0.5), torch.logspace(-4, 4, 500).tolist())
        widths = ([min(dim, round(scale * f**power)) for f in frequency] for power, scale in choices)
        dims = max((each for each in widths if self._params(each) <= budget), key=self._params)
        if not any(dims):
            raise DoesNotFit
        self.rest = nn.Parameter(torch.zeros(dim))
        self.blocks = nn.ModuleList(self._block(b - a, d, std) for (a, b), d in zip(self.ranges, dims, strict=True))

    def _params(self, dims: Sequence[int]) -> int:
        sizes = zip(self.ranges, dims, strict=True)
        return self.dim + sum((b - a) * d + (d * self.dim if d < self.dim else 0) for (a, b), d in sizes)

    def _block(self, rows: int, width: int, std: float) -> nn.Module:
        if width == 0:
            return nn.Identity()
        return Dense(rows, self.dim, std) if width == self.dim else Product(rows, width, self.dim, std, width**-0.5)

    def forward(self, ids: Tensor) -> Tensor:
        out_BN = self.rest.expand(len(ids), -1)
        for (start, stop), block in zip(self.ranges, self.blocks, strict=True):
            in_block = ((ids >= start) & (ids < stop)).nonzero().flatten()
            if in_block.numel() and not isinstance(block, nn.Identity):
                out_BN = out_BN.index_add(0, in_block, block(ids[in_block] - start))
        return out_BN


class Neighbors(Dense):
    """Rows that neighboring ids share."""

    def __init__(self, counts: Tensor, dim: int, budget: int, std: float = STD) -> None:
        super().__init__(budget // dim, dim, std)
        self.ids = len(counts)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids * len(self.weight) // self.ids)


def fit_(table: Table, rows: Tensor, counts: Tensor, steps: int = 400) -> None:
    """Fit a table to rows [M, N], weighted by how often ids occur, so that it starts from them."""
    optimizer, ids = torch.optim.Adam(table.parameters(), lr=0.02), torch.arange(len(rows))
    weights = ((counts + 1) / (counts + 1).sum())[:, None] / rows.square().mean()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.02 * (1 - step / steps)
        optimizer.zero_grad()
        (weights * (table(ids) - rows).square()).sum().backward()
        optimizer.step()
