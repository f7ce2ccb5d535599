"""Widths of a table's hot rows: blocks of ids that get narrower as ids get rarer, within a number of parameters."""

from __future__ import annotations

from collections.abc import Sequence

Blocks = tuple[tuple[int, int], ...]
"""(rows, width) of each block, from the most frequent ids on."""
Shares = list[tuple[int, float]]
"""(rows, share of the table's lookups that go to each row) of each block."""
_FIRST = 64  # rows of the first block
_MOST = 4  # blocks of a table, because each one adds time to every training step
_EXPONENT = 1.05
_POWER = 0.5


def staircases(num_embeddings: Sequence[int], embedding_dim: int, budget_params: float) -> list[Blocks]:
    """Choose blocks of hot rows for tables whose ids are ordered by frequency.

    A block's width is proportional to the square root of how often one of its rows is read, as in mixed dimension embeddings
    (Ginart et al., arXiv 1909.11810); ids are assumed to follow Zipf's law, and all tables to be read equally often. Each block
    ends at twice the id where the previous one ends, or at four or more times that id if there would otherwise be too many
    blocks; neighbors of equal width are merged.

    Args:
        num_embeddings: rows of each table.
        embedding_dim: columns N, the largest width.
        budget_params: the most parameters that all blocks together may take, projections and rank parameters included.

    Returns:
        The blocks of each table; no blocks where none fits.

    Example:
        >>> staircases([100_000], 16, 12_000)
        [((64, 16), (192, 8), (768, 4), (5875, 1))]
    """
    if not num_embeddings:
        return []
    growths = [2] * len(num_embeddings)
    while True:
        shares = [_shares(rows, growth) for rows, growth in zip(num_embeddings, growths, strict=True)]
        tables = _within(shares, embedding_dim, budget_params)
        wider = [growth if len(blocks) <= _MOST else 2 * growth for growth, blocks in zip(growths, tables, strict=True)]
        if wider == growths:
            break
        growths = wider
    unused = (budget_params - sum(blocks_params(blocks, embedding_dim) for blocks in tables)) / len(tables)
    return [_extended(blocks, rows, embedding_dim, unused) for blocks, rows in zip(tables, num_embeddings, strict=True)]


def _within(shares: Sequence[Shares], max_width: int, budget_params: float) -> list[Blocks]:
    """Return the blocks of all tables at the largest common scale of widths that fits."""
    low, high = 0.0, 4.0 * max_width * max(1.0, *((1 / table[-1][1]) ** _POWER for table in shares))
    for _ in range(60):
        scale = (low + high) / 2
        if sum(blocks_params(_blocks(table, max_width, scale), max_width) for table in shares) <= budget_params:
            low = scale
        else:
            high = scale
    return [_blocks(table, max_width, low) for table in shares]


def _extended(blocks: Blocks, num_embeddings: int, columns: int, params: float) -> Blocks:
    """Spend the parameters that whole columns leave unused on a last block of rows of width 1."""
    remaining = num_embeddings - sum(rows for rows, _ in blocks)
    if blocks and blocks[-1][1] == 1:
        *others, (rows, _) = blocks
        return (*others, (rows + min(int(params), remaining), 1))
    rows = min(int(params) - columns - 1, remaining)
    return (*blocks, (rows, 1)) if rows >= _FIRST else blocks


def _shares(num_embeddings: int, growth: int) -> Shares:
    """Return the rows of every possible block, and the share of lookups that go to each row."""

    def before(row: int) -> float:
        integral = (row + 0.5) ** (1 - _EXPONENT) - 0.5 ** (1 - _EXPONENT)
        return integral / ((num_embeddings + 0.5) ** (1 - _EXPONENT) - 0.5 ** (1 - _EXPONENT))

    shares, start, stop = [], 0, _FIRST
    while start < num_embeddings:
        stop = min(stop, num_embeddings)
        shares.append((stop - start, (before(stop) - before(start)) / (stop - start)))
        start, stop = stop, stop * growth
    return shares


def _blocks(shares: Shares, max_width: int, scale: float) -> Blocks:
    blocks: list[tuple[int, int]] = []
    for rows, share in shares:
        width = min(max_width, rows, int(scale * share**_POWER))
        if blocks and blocks[-1][1] == width:
            rows += blocks.pop()[0]
        blocks.append((rows, width))
    return tuple(block for block in blocks if block[1])


def blocks_params(blocks: Blocks, columns: int) -> int:
    """Count the parameters of blocks, including their projections to `columns` columns and their rank parameters."""
    return sum(rows * width + width * columns + width for rows, width in blocks)
