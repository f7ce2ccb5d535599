"""Hot rows that follow the frequencies of ids."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from comera_rec.nn.hot_rows import HotRows
from comera_rec.nn.tt_table import TTTable
from comera_rec.tt import row_digits
from data_pipeline.errors import UserError

_DEVIATIONS = 3  # of a difference of counts, if both ids were equally frequent; fewer may be chance


@torch.no_grad()
def rerank_hot_rows_(model: nn.Module, optimizer: Optimizer | None, frequencies: Mapping[str, Tensor]) -> dict[str, int]:
    """Give hot rows to the ids that are most frequent now, where hot rows belong to ids that were.

    An id that became frequent trades rows with one that no longer is, by `row_order`. Its new hot row is fitted to the values that
    the id had: a row of full width keeps them, a narrow one only what its columns can hold, so train on afterwards. The other id
    gets what the cores have at its new row: what it had learned is lost. Ids trade only where their counts differ by more than
    chance. All other ids keep their rows.

    Args:
        model: with TT tables that have hot rows; not yet sharded.
        optimizer: of the hot rows; their state is set to zero where ids trade rows. None if they have none.
        frequencies: counts [M] of ids in recent data, equal on all processes, by a table's path in the model or the end of it, its
            name in a collection.

    Raises:
        ValueError: for names without such a table, a wrong number of counts, or a table whose rows are divided over processes.

    Returns:
        By table, how many ids have got a hot row or one in a wider block.

    Example:
        >>> from comera_rec.nn import TTEmbedding
        >>> model = nn.ModuleDict({"pages": TTEmbedding(1000, 8, tt_ranks=2, hot_rows=((10, 4),))})
        >>> counts = torch.zeros(1000, dtype=torch.long).index_fill(0, torch.tensor([3, 997]), 50)
        >>> rerank_hot_rows_(model, None, {"pages": counts}), model["pages"].row_order[997].item() < 10
        ({'pages': 1}, True)
    """
    tables = {path: table for path, table in model.named_modules() if isinstance(table, TTTable) and table.num_hot_rows}
    moved = {}
    for name, counts in frequencies.items():
        paths = [name] if name in tables else [path for path in tables if path.endswith(f".{name}")]
        if len(paths) != 1:
            raise UserError(
                f"{name!r} names {len(paths)} TT tables with hot rows, not one: the model has {sorted(tables) or 'none'}"
            )
        table = tables[paths[0]]
        if table.whole_shape != table.shape:
            raise UserError(f"rows of table {name!r} are divided over processes: give hot rows to other ids before it is sharded")
        if counts.shape != (table.num_embeddings,):
            raise UserError(f"frequencies of {name!r} have shape {tuple(counts.shape)}: give {table.num_embeddings} counts")
        moved[name] = _rerank_(table, optimizer, counts)
    return moved


def _rerank_(table: TTTable, optimizer: Optimizer | None, counts: Tensor) -> int:
    device = table.core_0.device
    before = torch.arange(table.num_embeddings, device=device) if table.row_order is None else table.row_order.long()
    row_of, moved = _traded(before, counts.to(device), [block.num_rows for block in table.hot_blocks()])
    ids = (row_of != before).nonzero().flatten()
    if not len(ids):
        return 0
    values = _core_rows(table, before[ids])
    for block, inside, rows in _in_blocks(table, before[ids]):
        values[inside] += block.core_0.float()[0, rows, 0] @ _projection(block)
    values -= _core_rows(table, row_of[ids])
    for block, inside, rows in _in_blocks(table, row_of[ids]):
        fitted = values[inside].double() @ torch.linalg.pinv(_projection(block).double())
        core = block.core_0
        core[0, rows, 0] = fitted.to(core.dtype)
        of_core = [
            each.state.get(core, {}) for each in (optimizer, *getattr(core, "_in_backward_optimizers", ())) if each is not None
        ]
        for state in (value for states in of_core for value in states.values()):
            if isinstance(state, Tensor) and core.shape[:2] in (state.shape[:2], (1, *state.shape)):  # or row-wise sums
                state.view(block.num_rows, -1)[rows] = 0
    table.set_row_order_(row_of)
    return moved


def _traded(before: Tensor, counts: Tensor, sizes: list[int]) -> tuple[Tensor, int]:
    """Return the rows of ids [M] after trades at the end of each block of hot rows, and the number of trades."""
    row_of, ranked, end, moved = before.clone(), counts.argsort(descending=True, stable=True), 0, 0
    for size in sizes:
        end += size
        entering = ranked[:end][row_of[ranked[:end]] >= end]
        leaving = ranked[end:][row_of[ranked[end:]] < end].flip(0)  # the least frequent first
        more, fewer = counts[entering].double(), counts[leaving].double()
        trading = (more - fewer > _DEVIATIONS * (more + fewer).sqrt()).nonzero().flatten()
        entering, leaving = entering[trading], leaving[trading]
        row_of[entering], row_of[leaving] = row_of[leaving], row_of[entering]
        moved += len(entering)
    return row_of, moved


def _core_rows(table: TTTable, rows: Tensor) -> Tensor:
    """[R, N], what the cores alone have at rows [R]."""
    values = torch.ones(len(rows), 1, 1, device=rows.device)
    for core, digits in zip(table.scaled_cores(), row_digits(rows, table.shape.row_shape), strict=True):
        values = torch.einsum("rcp,prnq->rcnq", values, core.float()[:, digits]).flatten(1, 2)
    return values[:, : table.num_cols, 0]


def _in_blocks(table: TTTable, rows: Tensor) -> Iterator[tuple[HotRows, Tensor, Tensor]]:
    """Yield each block that has some of the rows, the positions of these among the rows, and their numbers in the block."""
    for block in table.hot_blocks():
        inside = ((rows >= block.first) & (rows < block.first + block.num_rows)).nonzero().flatten()
        if len(inside) and block.shape.ranks[0]:
            yield block, inside, rows[inside] - block.first


def _projection(block: HotRows) -> Tensor:
    """diag(D) P, [k, N]."""
    return block.rank_parameters()[0].float().view(-1, 1) * block.core_1.float()[:, 0, :, 0]
