"""How wide the rows of a table's frequent ids are: blocks of ids that grow narrower by frequency, within a number of parameters."""

from __future__ import annotations

from collections.abc import Sequence

Blocks = tuple[tuple[int, int], ...]
"""(rows, width) of each block, from the most frequent ids on."""
Shares = list[tuple[int, float]]
"""(rows, share of a table's lookups that one of them has) of blocks."""
_FIRST = 64  # rows of the first block
_MOST = 4  # blocks of a table: a step of training pays for each
_EXPONENT = 1.05
_POWER = 0.5


def staircases(num_embeddings: Sequence[int], embedding_dim: int, budget_params: float) -> list[Blocks]:
    """Blocks of rows for tables whose ids are ordered by frequency.

    The width of a block is proportional to the square root of how often a row of it is read, as in mixed dimension embeddings
    (Ginart et al., arXiv 1909.11810), where ids follow Zipf's law and all tables are read alike. Each block ends at twice the
    id at which the one before it does, or at four or more times where blocks would be many; neighbours of one width are one.

    Args:
        num_embeddings: rows of each table.
        embedding_dim: columns N, the largest width.
        budget_params: the most parameters that all blocks together may take, projections and rank parameters included.

    Returns:
        Blocks of each table; none where nothing fits.

    Example:
        >>> staircases([100_000], 16, 12_000)
        [((64, 16), (192, 8), (768, 4), (5875, 1))]
    """
    if not num_embeddings:
        return []
    growths = [2] * len(num_embeddings)
    while True:
        shares = [_shares(rows, growth) for rows, growth in zip(num_embeddings, growths, strict=True)]
        found = _within(shares, embedding_dim, budget_params)
        wider = [growth if len(blocks) <= _MOST else 2 * growth for growth, blocks in zip(growths, found, strict=True)]
        if wider == growths:
            break
        growths = wider
    left = budget_params - sum(blocks_params(blocks, embedding_dim) for blocks in found)
    return [_extended(blocks, rows, embedding_dim, left / len(found)) for blocks, rows in zip(found, num_embeddings, strict=True)]


def _within(shares: Sequence[Shares], most: int, budget_params: float) -> list[Blocks]:
    """Blocks of all tables at the largest common scale of widths that fits."""
    low, high = 0.0, 4.0 * most * max(1.0, *((1 / of_table[-1][1]) ** _POWER for of_table in shares))
    for _ in range(60):
        scale = (low + high) / 2
        if sum(blocks_params(_blocks(of_table, most, scale), most) for of_table in shares) <= budget_params:
            low = scale
        else:
            high = scale
    return [_blocks(of_table, most, low) for of_table in shares]


def _extended(blocks: Blocks, num_embeddings: int, columns: int, params: float) -> Blocks:
    """With rows of one number more, for what whole columns of blocks have left over."""
    held = sum(rows for rows, _ in blocks)
    if blocks and blocks[-1][1] == 1:
        *others, (rows, _) = blocks
        return (*others, (rows + min(int(params), num_embeddings - held), 1))
    rows = min(int(params) - columns - 1, num_embeddings - held)
    return (*blocks, (rows, 1)) if rows >= _FIRST else blocks


def _shares(num_embeddings: int, growth: int) -> Shares:
    """Of each block that there may be."""

    def before(row: int) -> float:
        integral = (row + 0.5) ** (1 - _EXPONENT) - 0.5 ** (1 - _EXPONENT)
        return integral / ((num_embeddings + 0.5) ** (1 - _EXPONENT) - 0.5 ** (1 - _EXPONENT))

    shares, start, stop = [], 0, _FIRST
    while start < num_embeddings:
        stop = min(stop, num_embeddings)
        shares.append((stop - start, (before(stop) - before(start)) / (stop - start)))
        start, stop = stop, stop * growth
    return shares


def _blocks(shares: Shares, most: int, scale: float) -> Blocks:
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
