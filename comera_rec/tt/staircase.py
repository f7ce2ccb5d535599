"""How wide the rows of a table's frequent ids are: blocks of ids that grow narrower by frequency, within a number of parameters."""

from __future__ import annotations

from collections.abc import Sequence

Blocks = tuple[tuple[int, int], ...]
"""(rows, width) of each block, from the most frequent ids on."""
_FIRST, _GROWTH = 64, 4  # rows of the first block; each next one ends at so many times the id at which its predecessor does
_EXPONENT = 1.05
_POWER = 0.5


def staircases(num_embeddings: Sequence[int], embedding_dim: int, budget_params: float) -> list[Blocks]:
    """Blocks of rows for tables whose ids are ordered by frequency.

    The width of a block is proportional to the square root of how often a row of it is read, as in mixed dimension embeddings
    (Ginart et al., arXiv 1909.11810), where ids follow Zipf's law and all tables are read alike. Each block but the last ends at
    four times the id at which the one before it does, so it takes about twice as many parameters.

    Args:
        num_embeddings: rows of each table.
        embedding_dim: columns N, the largest width.
        budget_params: the most parameters that all blocks together may take, projections and rank parameters included.

    Returns:
        Blocks of each table; none where nothing fits.

    Example:
        >>> staircases([100_000], 16, 12_000)
        [((64, 16), (192, 8), (768, 4), (3072, 1))]
    """
    shares = [_shares(rows) for rows in num_embeddings]
    low, high = 0.0, 4.0 * embedding_dim * max(1.0, *((1 / share[-1][1]) ** _POWER for share in shares))
    for _ in range(60):
        scale = (low + high) / 2
        if sum(blocks_params(_blocks(share, embedding_dim, scale), embedding_dim) for share in shares) <= budget_params:
            low = scale
        else:
            high = scale
    return [_blocks(share, embedding_dim, low) for share in shares]


def _shares(num_embeddings: int) -> list[tuple[int, float]]:
    """(rows, share of the lookups that one of them has) of each block that there may be."""

    def before(row: int) -> float:
        integral = (row + 0.5) ** (1 - _EXPONENT) - 0.5 ** (1 - _EXPONENT)
        return integral / ((num_embeddings + 0.5) ** (1 - _EXPONENT) - 0.5 ** (1 - _EXPONENT))

    shares, start, stop = [], 0, _FIRST
    while start < num_embeddings:
        stop = min(stop, num_embeddings)
        shares.append((stop - start, (before(stop) - before(start)) / (stop - start)))
        start, stop = stop, stop * _GROWTH
    return shares


def _blocks(shares: Sequence[tuple[int, float]], most: int, scale: float) -> Blocks:
    blocks: list[tuple[int, int]] = []
    for rows, share in shares:
        width = min(most, rows, int(scale * share**_POWER))
        if blocks and blocks[-1][1] == width:
            rows += blocks.pop()[0]
        blocks.append((rows, width))
    return tuple(block for block in blocks if block[1])


def blocks_params(blocks: Blocks, columns: int) -> int:
    """Numbers that blocks take, projections to so many columns and rank parameters included."""
    return sum(rows * width + width * columns + width for rows, width in blocks)
