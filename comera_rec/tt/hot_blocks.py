"""Hot rows of tables: how many ids get one, and how wide rows are, within a number of parameters."""

from bisect import bisect_right
from collections.abc import Sequence
from math import ceil, log2

Blocks = tuple[tuple[int, int], ...]
"""(rows, width) of each block, from the most frequent ids on."""
_WIDE, _WIDE_AND_MIDDLE = 0.05, 0.15  # shares of the budget: full rows for the most frequent ids, and these with the next block


def choose_hot_blocks(num_embeddings: Sequence[int], embedding_dim: int, budget_params: float) -> list[Blocks]:
    """Choose blocks of hot rows for tables whose ids are ordered by frequency.

    A few numbers for each of many ids predict better than many numbers for each of a few. So most of the budget goes to narrow
    rows: their width is the smallest power of two at which rows for all ids would use up the budget. Only the most frequent ids,
    which see enough data to train them, get wider rows: a first block on 5 % of the budget has the table's width, a second one
    on 10 % the geometric mean of both widths, rounded up to a power of two. These are mixed dimension embeddings (Ginart et al.,
    arXiv 1909.11810) of three dimensions. Rows of one or two columns are cut into two blocks: a second projection costs little, and
    training can remove the block of rarer ids.

    Every table gives rows of a width to the same number of ids, or to all its remaining ids if these are fewer. If tables are read
    equally often and ids follow Zipf's law, ids with rows of equal width are read about equally often in all tables.

    Args:
        num_embeddings: rows of each table.
        embedding_dim: columns N, the largest width.
        budget_params: the most parameters that all blocks together may take, projections and rank parameters included.

    Returns:
        The blocks of each table; no blocks where none fits.

    Example:
        >>> choose_hot_blocks([100_000, 3_000], 16, 12_000)
        [((208, 4), (3670, 1), (3670, 1)), ((208, 4), (1396, 1), (1396, 1))]
    """
    narrow = _power_of_two(budget_params / max(1, sum(num_embeddings)), embedding_dim)
    middle = _power_of_two((narrow * embedding_dim) ** 0.5, embedding_dim)
    tables: list[Blocks] = [()] * len(num_embeddings)
    limits = {embedding_dim: _WIDE, middle: _WIDE_AND_MIDDLE, narrow: 1.0}  # equal widths make one block
    for width, share in limits.items():

        def extended(rows: int, width: int = width, tables: Sequence[Blocks] = tables) -> list[Blocks]:
            counts = [min(rows, most - sum(n for n, _ in blocks)) for blocks, most in zip(tables, num_embeddings, strict=True)]
            return [(*blocks, *_cut(n, width, embedding_dim)) for blocks, n in zip(tables, counts, strict=True)]

        rows = bisect_right(
            range(1, max(num_embeddings, default=0) + 1),
            share * budget_params,
            key=lambda rows: sum(blocks_params(blocks, embedding_dim) for blocks in extended(rows)),
        )
        if rows >= width:  # the projection of a smaller block would be larger than its rows
            tables = extended(rows)
    return tables


def _power_of_two(least: float, most: int) -> int:
    return min(most, 1 << max(0, ceil(log2(max(least, 1)))))


def _cut(rows: int, width: int, columns: int) -> Blocks:
    """Return rows as one block or two; none has fewer rows than its projection has columns, or is wider than it has rows."""
    size = -(-rows // 2) if width <= 2 and rows >= 2 * columns else max(rows, 1)
    return tuple((n, min(width, n)) for first in range(0, rows, size) if (n := min(size, rows - first)))


def blocks_params(blocks: Blocks, columns: int) -> int:
    """Count the parameters of blocks, including their projections to `columns` columns and their rank parameters."""
    return sum(rows * width + width * columns + width for rows, width in blocks)
