"""Ways to hold embedding tables in fewer bytes, all called as ids [B, F] -> [B, F, N] (a single table: [B] -> [B, N]).

B batch, F fields, M rows and N columns of a table; budget: parameters, or bytes over 4.

Every method keeps the tables below `MIN_ROWS` rows dense and shrinks the others together by the same factor.

    hashing     M' < M rows; the id's hash picks one. Weinberger et al., arXiv 0902.2206
    two hashes  the sum of two rows of one table, picked by two hashes. Serra and Karatzoglou, arXiv 1706.03993
    ROBE        one array for a table; each quarter of a row starts at a hashed place of it. Desai et al., arXiv 2108.02191
    DHE         64 hashes of the id, as numbers, through an MLP with one hidden layer. Kang et al., arXiv 2010.10784
    CAFE        rows of their own for the most frequent ids, on seven tenths of the bytes, and hashing for the others. Zhang et al.,
                arXiv 2312.03256; with the frequencies known from the start, where the paper has a sketch of them
    QR          a row of ceil(M/b) times, element by element, a row of b: id // b and id % b. Shi et al., arXiv 1909.02107
    QR in parts as few digits of the id, with a table each, as fit, at least three
    low rank    [M, k] times [k, N]
    mixed dim   blocks of ids by frequency f, of dims ~ f^0.2 to f^0.5 (what fills the budget best) and a projection each; the
                rarest may share one vector (dim 0). Ginart et al., arXiv 1909.11810
    pruning     a dense table whose smallest entries vanish while training (cubic schedule of arXiv 1710.01878); an entry left
                takes 8 bytes, value and index
    TT          tensor trains of one rank
    TT + rows   trains of one rank on a fifth of the bytes, and on four fifths rows of the most frequent ids, narrower the rarer
                (`TTEmbeddingConfig(hot_rows="auto")`)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from comera_rec import TTEmbeddingBag, TTEmbeddingBagConfig, TTEmbeddingConfig

MIN_ROWS = 1000
STD = 0.1  # of initial entries, for all methods


class DoesNotFit(Exception):
    """A method has no form this small."""


class Dense(nn.Module):
    """One table, dense."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(STD * torch.randn(rows, dim))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class Hashed(Dense):
    """Rows shared by ids of one hash."""

    def __init__(self, counts: Tensor, dim: int, budget: int) -> None:
        if budget < dim:
            raise DoesNotFit
        super().__init__(budget // dim, dim)

    def forward(self, ids: Tensor) -> Tensor:
        # Fibonacci hashing, 31 bits: neighbouring ids are spread.
        return super().forward((ids * 2_654_435_769 % (1 << 32) >> 1) % len(self.weight))


def _hash(ids: Tensor, seed: int) -> Tensor:
    """31 bits: multiplication, folding and multiplication again (as MurmurHash3 ends)."""
    keys = (ids + seed * 7_919) * 2_246_822_519 % (1 << 32)
    return (keys ^ keys >> 15) * 3_266_489_917 % (1 << 32) >> 1


class TwoHashes(Hashed):
    """Sums of two rows."""

    def forward(self, ids: Tensor) -> Tensor:
        first, second = (F.embedding(_hash(ids, seed) % len(self.weight), self.weight) for seed in (1, 2))
        return first + second


class Robe(nn.Module):
    """Parts of rows in one array."""

    def __init__(self, counts: Tensor, dim: int, budget: int) -> None:
        super().__init__()
        self.part = dim // 4
        if budget < self.part:
            raise DoesNotFit
        self.array = nn.Parameter(STD * torch.randn(budget))

    def forward(self, ids: Tensor) -> Tensor:
        starts = torch.stack([_hash(ids, part) for part in range(4)], dim=1)[:, :, None]
        return self.array[(starts + torch.arange(self.part)) % len(self.array)].flatten(1)


class DeepHash(nn.Module):
    """No rows at all: an MLP over hashes."""

    hashes = 64

    def __init__(self, counts: Tensor, dim: int, budget: int) -> None:
        super().__init__()
        hidden = (budget - dim) // (self.hashes + 1 + dim)
        if hidden < 1:
            raise DoesNotFit
        self.mlp = nn.Sequential(nn.Linear(self.hashes, hidden), nn.Mish(), nn.Linear(hidden, dim))

    def forward(self, ids: Tensor) -> Tensor:
        codes = torch.stack([_hash(ids, k) for k in range(self.hashes)], dim=1)
        rows: Tensor = self.mlp(codes / 2**30 - 1)
        return rows


class HotAndHashed(nn.Module):
    """Rows for some, a hash for the rest."""

    def __init__(self, counts: Tensor, dim: int, budget: int) -> None:
        super().__init__()
        self.rows = min(int(0.7 * budget) // dim, len(counts))
        if budget // dim <= self.rows:
            raise DoesNotFit
        self.table = Dense(budget // dim, dim)

    def forward(self, ids: Tensor) -> Tensor:
        shared = self.rows + _hash(ids, 1) % (len(self.table.weight) - self.rows)
        rows: Tensor = self.table(torch.where(ids < self.rows, ids, shared))
        return rows


class Digits(nn.Module):
    """A small table for each digit of the id, multiplied."""

    def __init__(self, counts: Tensor, dim: int, budget: int) -> None:
        super().__init__()
        fitting = [k for k in range(3, 9) if k * self._base(len(counts), k) * dim <= budget]
        if not fitting:
            raise DoesNotFit
        self.base = self._base(len(counts), fitting[0])
        self.tables = nn.ParameterList(nn.Parameter(STD * torch.randn(self.base, dim) + (part > 0)) for part in range(fitting[0]))

    @staticmethod
    def _base(rows: int, parts: int) -> int:
        return next(base for base in range(2, rows + 2) if base**parts >= rows)

    def forward(self, ids: Tensor) -> Tensor:
        rows = F.embedding(ids % self.base, self.tables[0])
        for table in list(self.tables)[1:]:
            ids = ids // self.base
            rows = rows * F.embedding(ids % self.base, table)
        return rows


class QuotientRemainder(nn.Module):
    """Two small tables, multiplied."""

    def __init__(self, counts: Tensor, dim: int, budget: int) -> None:
        super().__init__()
        rows, most = len(counts), budget // dim
        fitting = [b for b in range(1, most) if b + -(-rows // b) <= most]
        if not fitting:
            raise DoesNotFit
        self.base = max(fitting, key=lambda b: b + -(-rows // b))
        self.quotients = nn.Parameter(1 + STD * torch.randn(-(-rows // self.base), dim))
        self.remainders = nn.Parameter(STD * torch.randn(self.base, dim))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids // self.base, self.quotients) * F.embedding(ids % self.base, self.remainders)


class LowRank(nn.Module):
    """[M, k] times [k, N]."""

    def __init__(self, counts: Tensor, dim: int, budget: int) -> None:
        super().__init__()
        rank = budget // (len(counts) + dim)
        if not rank:
            raise DoesNotFit
        self.left = nn.Parameter((STD / rank**0.5) ** 0.5 * torch.randn(len(counts), rank))
        self.right = nn.Parameter((STD / rank**0.5) ** 0.5 * torch.randn(rank, dim))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.left) @ self.right


class MixedDimension(nn.Module):
    """Blocks of ids by frequency, narrower the rarer."""

    def __init__(self, counts: Tensor, dim: int, budget: int) -> None:
        super().__init__()
        self.dim = dim
        edges = [0, *(16 * 2**k for k in range(40) if 16 * 2**k < len(counts)), len(counts)]
        self.starts, self.stops = edges[:-1], edges[1:]
        frequency = [float(counts[a:b].double().mean()) + 1 for a, b in zip(self.starts, self.stops, strict=True)]
        dims = max((d for d in self._choices(frequency) if self._params(d) <= budget), key=self._params)
        if not any(dims):
            raise DoesNotFit
        self.rest = nn.Parameter(torch.zeros(dim))
        self.blocks = nn.ModuleList(self._block(b - a, d) for a, b, d in zip(self.starts, self.stops, dims, strict=True))

    def _choices(self, frequency: Sequence[float]) -> list[list[int]]:
        scales = torch.logspace(-4, 4, 500).tolist()
        return [[min(self.dim, round(scale * f**power)) for f in frequency] for power in (0.2, 0.3, 0.4, 0.5) for scale in scales]

    def _params(self, dims: Sequence[int]) -> int:
        sizes = zip(self.starts, self.stops, dims, strict=True)
        return self.dim + sum((b - a) * d + (d * self.dim if d < self.dim else 0) for a, b, d in sizes)

    def _block(self, rows: int, width: int) -> nn.Module:
        if width == 0:
            return nn.Identity()
        return Dense(rows, self.dim) if width == self.dim else _Projected(rows, width, self.dim)

    def forward(self, ids: Tensor) -> Tensor:
        out_BN = self.rest.expand(len(ids), -1)
        for start, stop, block in zip(self.starts, self.stops, self.blocks, strict=True):
            mine = ((ids >= start) & (ids < stop)).nonzero().flatten()
            if mine.numel() and not isinstance(block, nn.Identity):
                out_BN = out_BN.index_add(0, mine, block(ids[mine] - start))
        return out_BN


class _Projected(nn.Module):
    def __init__(self, rows: int, width: int, dim: int) -> None:
        super().__init__()
        self.left = nn.Parameter(STD * torch.randn(rows, width))
        self.right = nn.Parameter(width**-0.5 * torch.randn(width, dim))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.left) @ self.right


class Train(nn.Module):
    """A tensor train, with hot rows or without."""

    def __init__(self, config: TTEmbeddingBagConfig) -> None:
        super().__init__()
        self.bag = TTEmbeddingBag(
            config.num_embeddings, config.embedding_dim, shape=config.tt_shape(), hot_rows=config.hot_rows, std=STD
        )

    def forward(self, ids: Tensor) -> Tensor:
        pooled: Tensor = self.bag(ids[:, None])
        return pooled


class Embeddings(nn.Module):
    """The tables of all fields; `tables` holds the large ones.

    Args:
        counts: per field [M], how often each id occurs in training.
        dim: N.
        method: a key of `PER_TABLE`, "dense", "pruning" (which starts dense), "TT", or "TT + rows".
        compression: dense parameters of the large tables over those they take.
        trains: for "TT" and "TT + rows"; default those that `TTEmbeddingConfig(compression=...)` chooses.

    Raises:
        DoesNotFit: if the method has no form this small.
    """

    starts: Tensor

    def __init__(
        self,
        counts: Sequence[Tensor],
        dim: int,
        method: str,
        compression: float,
        trains: Sequence[TTEmbeddingBagConfig] | None = None,
    ) -> None:
        super().__init__()
        self.large = [f for f, count in enumerate(counts) if len(count) >= MIN_ROWS]
        self.budget = int(sum(len(counts[f]) for f in self.large) * dim / compression)
        sizes = [len(counts[f]) for f in self.large]
        if method.startswith("TT") and trains is None:
            trains = tt_tables(sizes, dim, compression, "auto" if "rows" in method else 0)
        small = [f for f in range(len(counts)) if f not in self.large]
        # One table for all small ones: with twenty of them, half of a step would be their bookkeeping.
        self.small = Dense(sum(len(counts[f]) for f in small), dim) if small else None
        self.register_buffer("starts", torch.tensor([0, *(len(counts[f]) for f in small)]).cumsum(0)[:-1], persistent=False)
        self.columns = [*small, *self.large]
        tables: list[nn.Module] = []
        for place, f in enumerate(self.large):
            count = counts[f]
            if method in ("dense", "pruning"):
                tables.append(Dense(len(count), dim))
            elif trains is not None:
                tables.append(Train(trains[place]))
            else:
                tables.append(PER_TABLE[method](count, dim, int(len(count) * dim / compression)))
        self.tables = nn.ModuleList(tables)

    def forward(self, ids: Tensor) -> Tensor:
        ids = ids[:, self.columns]  # small tables first: their places in the interaction are the same for all methods
        few = len(self.columns) - len(self.large)
        large = [table(ids[:, few + k])[:, None] for k, table in enumerate(self.tables)]
        return torch.cat([self.small(ids[:, :few] + self.starts), *large] if self.small is not None else large, dim=1)

    def large_params(self) -> int:
        """What the tables that a method shrinks hold."""
        return sum(p.numel() for p in self.tables.parameters())


def tt_tables(
    sizes: Sequence[int], dim: int, compression: float, hot_rows: float | Literal["auto"] = 0, order: int | None = None
) -> list[TTEmbeddingBagConfig]:
    """Trains of one rank within a compression of all tables together."""
    tables = [EmbeddingBagConfig(name=f"t{i}", num_embeddings=m, embedding_dim=dim) for i, m in enumerate(sizes)]
    try:
        return TTEmbeddingConfig(compression=compression, min_rows=1, order=order, hot_rows=hot_rows).table_configs(tables)
    except ValueError:
        raise DoesNotFit from None


PER_TABLE: dict[str, Callable[[Tensor, int, int], Any]] = {
    "hashing": Hashed,
    "two hashes": TwoHashes,
    "ROBE": Robe,
    "DHE": DeepHash,
    "CAFE": HotAndHashed,
    "QR in parts": Digits,
    "QR": QuotientRemainder,
    "low rank": LowRank,
    "mixed dim": MixedDimension,
}
