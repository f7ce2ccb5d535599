"""Hot rows of tables: how many ids get one, and how wide rows are, within a number of parameters."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

Blocks = tuple[tuple[int, int], ...]
"""(rows, width) of each block, from the most frequent ids on."""
_ENDS = (1 / 64, 1 / 8, 1.0)  # of blocks, as shares of a table's hot rows
_LEAST_ROWS = 64  # of a block, unless the table has fewer


def choose_hot_blocks(num_embeddings: Sequence[int], embedding_dim: int, budget_params: float) -> list[Blocks]:
    """Choose blocks of hot rows for tables whose ids are ordered by frequency.

    A few numbers for each of many ids predict better than many numbers for each of a few, so all rows have one width: the smallest
    power of two at which rows for all ids would use up the budget. Each table gets rows for the same number of its most frequent
    ids, or for all of them if it has fewer. If tables are read equally often and ids follow Zipf's law, all ids that get a row
    are thus read at least about as often as those that don't. Rows are cut into three blocks, each with its own projection, of
    which training can remove those of rarer ids.

    Args:
        num_embeddings: rows of each table.
        embedding_dim: columns N, the largest width.
        budget_params: the most parameters that all blocks together may take, projections and rank parameters included.

    Returns:
        The blocks of each table; no blocks where none fits.

    Example:
        >>> choose_hot_blocks([100_000, 3_000], 16, 12_000)
        [((139, 1), (975, 1), (7801, 1)), ((375, 1), (2625, 1))]
    """
    if not num_embeddings:
        return []
    width = 1
    while width < embedding_dim and width * sum(num_embeddings) < budget_params:
        width = min(2 * width, embedding_dim)

    def blocks(rows: int) -> list[Blocks]:
        return [_blocks(min(rows, most), width) for most in num_embeddings]

    def params(rows: int) -> int:
        return sum(blocks_params(each, embedding_dim) for each in blocks(rows))

    sizes = range(_LEAST_ROWS, max(_LEAST_ROWS, *num_embeddings) + 1)
    fitting = bisect_right(sizes, budget_params, key=params)
    return blocks(sizes[fitting - 1]) if fitting else [()] * len(num_embeddings)


def _blocks(rows: int, width: int) -> Blocks:
    """Cut rows into blocks, leaving out ends that would make one too short."""
    cuts = [0]
    for end in _ENDS:
        if (stop := round(rows * end)) - cuts[-1] >= _LEAST_ROWS or end == 1.0:
            cuts.append(stop)
    return tuple((stop - start, width) for start, stop in pairwise(cuts))


def blocks_params(blocks: Blocks, columns: int) -> int:
    """Count the parameters of blocks, including their projections to `columns` columns and their rank parameters."""
    return sum(rows * width + width * columns + width for rows, width in blocks)
