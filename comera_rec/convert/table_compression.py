"""Which tables of a model become TT tables, and how small."""

import math
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingConfig

from comera_rec.nn.linear_compression import require_one_size
from comera_rec.recsys import TTEmbeddingBagConfig, TTEmbeddingConfig
from comera_rec.tt import Blocks, TTShape, blocks_params, choose_hot_blocks
from data_pipeline.errors import UserError

AUTO_SHARES = (0.8, 0.5, 0.25, 0.0)  # of hot rows; "auto" takes the first that leaves room for TT rank 1


@dataclass(frozen=True, kw_only=True)
class TableCompression:
    """Settings of `comera_rec.compress_`: which tables become TT tables, and how small.

    Attributes:
        tt_ranks: one rank for all bonds, or one for each. Give at most one of `tt_ranks` and `compression`; default rank 16, or
            with `hot_rows` "auto" the number of parameters that rank 16 has.
        compression: least ratio of dense to compressed parameters of all tables together, those that stay dense included. All TT
            tables then have one rank, the largest that reaches it.
        order: number of cores, 2 to 4. Default 2, or one more than `tt_ranks` has entries; with `compression`, or `hot_rows` "auto"
            without ranks, the lowest order at which the rank reaches 8, or else the one with the largest rank.
        min_rows: tables with fewer rows stay dense.
        dense_tables: names of tables that stay dense whatever their size; of a layer of torch, its fully qualified name.
        hot_rows: share of the parameters of TT tables, from 0 to below 1, that is spent on hot rows, narrow ones for as many ids as
            possible (`comera_rec.tt.choose_hot_blocks`); with given ranks, hot rows are extra. "auto" is 0.8, or less if TT rank 1
            would not fit beside that, and 0 with given ranks. Use it only where ids are ordered by frequency, 0 being the most
            frequent, as `comera preprocess` numbers them.

    Raises:
        ValueError: for values out of range, or both `tt_ranks` and `compression`.
    """

    tt_ranks: int | tuple[int, ...] | None = None
    compression: float | None = None
    order: int | None = None
    min_rows: int = 10_000
    hot_rows: float | Literal["auto"] = 0
    dense_tables: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_one_size(self.tt_ranks, self.compression)
        if self.order not in (None, 2, 3, 4):
            raise UserError(f"order is {self.order!r}: embedding tables take 2, 3 or 4 cores")
        if not isinstance(self.min_rows, int) or self.min_rows < 0:
            raise UserError(f"min_rows is {self.min_rows!r}: give a number of rows")
        if self.hot_rows != "auto" and not (isinstance(self.hot_rows, int | float) and 0 <= self.hot_rows < 1):
            raise UserError(f"hot_rows is {self.hot_rows!r}: give 'auto', or a share of the parameters from 0 to below 1")
        if not isinstance(self.dense_tables, tuple) or not all(self.dense_tables):
            raise UserError(f"dense_tables is {self.dense_tables!r}: give a tuple of names")

    def require_tables(self, names: Collection[str]) -> None:
        """Raise ValueError if `dense_tables` has a name that is not one of the tables'."""
        if unknown := [name for name in self.dense_tables if name not in names]:
            raise UserError(f"dense_tables names {unknown[0]!r}, which is no table: choose from {', '.join(map(repr, names))}")

    def table_configs(
        self, tables: Sequence[Any], *, dense: Collection[int] = (), unordered: Collection[int] = (), others: int = 0
    ) -> list[Any]:
        """Return the configs of tables with the shapes that this config gives them.

        Args:
            tables: TorchRec's configs of the tables that share a budget.
            dense: positions of further tables that stay dense.
            unordered: positions of tables whose ids aren't ordered by frequency; they get no hot rows.
            others: numbers besides the tables' parameters that the budget has to pay for.

        Raises:
            ValueError: if not even rank 1 reaches the compression.
        """
        large, total, small = self._large_tables(tables, dense)
        budget: float | None = None
        if large and self.compression is not None:
            budget = total / self.compression - small - others
        elif large and self.shares_size:
            budget = self._params([tables[k] for k in large], None, self.order)
        shares = AUTO_SHARES if self.hot_rows == "auto" and budget is not None else (self._least_share,)
        for share in shares:
            hot, shapes = self._sizes([tables[k] for k in large], budget, share, [k not in unordered for k in large])
            if shapes is not None:
                sizes = {k: size for k, *size in zip(large, shapes, hot, strict=True)}
                kinds = [TTEmbeddingConfig if isinstance(table, EmbeddingConfig) else TTEmbeddingBagConfig for table in tables]
                return [kinds[k].from_dense(table, *sizes.get(k, (None,))) for k, table in enumerate(tables)]
        raise UserError(
            f"compression {self.compression} can't be reached: the tables that stay dense (below {self.min_rows} rows"
            f"{', in dense_tables' if self.dense_tables else ''}{', or with a shared weight' if dense else ''}) and "
            f"the others at rank 1{f' beside hot_rows {self.hot_rows}' if shares[-1] else ''} are larger than that; lower "
            f"min_rows, or lower compression to {self.most_compression(tables, dense=dense, others=others):g}"
        )

    def reason_to_stay_dense(self, table: BaseEmbeddingConfig) -> str | None:
        """Return which of this config's fields keeps a table dense, or None if it becomes a TT table."""
        if table.num_embeddings < self.min_rows:
            return f"it has fewer than {self.min_rows} rows"
        return "dense_tables names it" if table.name in self.dense_tables else None

    def most_compression(self, tables: Sequence[Any], *, dense: Collection[int] = (), others: int = 0) -> float:
        """Return the largest compression that `table_configs` can reach, rounded down to tenths; infinity without TT tables."""
        large, total, small = self._large_tables(tables, dense)
        if not large:
            return math.inf
        orders = (self.order,) if self.order else (2, 3, 4)
        least = min(self._params([tables[k] for k in large], 1, order) for order in orders)
        return math.floor(10 * total / (small + others + least / (1 - self._least_share))) / 10

    @property
    def shares_size(self) -> bool:
        """Whether ranks and hot rows follow from the size of all tables together."""
        return self.compression is not None or (self.hot_rows == "auto" and self.tt_ranks is None)

    @property
    def _least_share(self) -> float:
        """The least share of hot rows that the config allows."""
        return 0 if self.hot_rows == "auto" else self.hot_rows

    def _large_tables(self, tables: Sequence[Any], dense: Collection[int]) -> tuple[list[int], int, int]:
        """Return positions of the tables that become TT tables, the dense parameters of all tables, and those of the others."""
        large = [k for k, table in enumerate(tables) if k not in dense and self.reason_to_stay_dense(table) is None]
        params = list(map(_dense_params, tables))
        return large, sum(params), sum(params) - sum(params[k] for k in large)

    def _sizes(
        self, tables: Sequence[BaseEmbeddingConfig], budget: float | None, share: float, is_ordered: Sequence[bool]
    ) -> tuple[list[Blocks], list[TTShape] | None]:
        """Return hot rows and TT shapes of tables; None for the shapes if rank 1 doesn't fit the budget beside the hot rows."""
        ordered = sum(_dense_params(table) * has_order for table, has_order in zip(tables, is_ordered, strict=True))
        of_ordered = ordered / max(1, sum(map(_dense_params, tables)))
        if budget is None:
            shapes = [self._shape(table, self.tt_ranks, self.order) for table in tables]
            of_cores = sum(shape.num_params for shape in shapes)
            return _hot_rows(tables, share / (1 - share) * of_cores * of_ordered, is_ordered), shapes
        hot = _hot_rows(tables, share * budget * of_ordered, is_ordered)
        taken = sum(blocks_params(blocks, table.embedding_dim) for blocks, table in zip(hot, tables, strict=True))
        fitting = self._fitting_shapes(tables, budget - taken)
        if share and fitting:  # spend what whole ranks leave unused
            hot = _hot_rows(tables, budget - sum(shape.num_params for shape in fitting), is_ordered)
        return hot, fitting

    @staticmethod
    def _shape(table: BaseEmbeddingConfig, tt_ranks: int | tuple[int, ...] | None, order: int | None) -> TTShape:
        return TTShape.for_table(table.num_embeddings, table.embedding_dim, tt_ranks=tt_ranks, order=order)

    def _fitting_shapes(self, tables: Sequence[BaseEmbeddingConfig], budget: float) -> list[TTShape] | None:
        best: tuple[int, list[TTShape] | None] = (0, None)
        for order in (self.order,) if self.order else (2, 3, 4):
            ranks = range(1, max(table.num_embeddings for table in tables) + 1)
            rank = bisect_right(ranks, budget, key=lambda r: self._params(tables, r, order))
            if rank > best[0]:
                best = rank, [self._shape(table, rank, order) for table in tables]
            if rank >= 8:
                break
        return best[1]

    def _params(self, tables: Sequence[BaseEmbeddingConfig], rank: int | None, order: int | None) -> int:
        return sum(self._shape(table, rank, order).num_params for table in tables)


def _hot_rows(tables: Sequence[BaseEmbeddingConfig], budget_params: float, is_ordered: Sequence[bool]) -> list[Blocks]:
    blocks: list[Blocks] = [()] * len(tables)
    ordered = {k: table for k, table in enumerate(tables) if is_ordered[k]}
    total = sum(_dense_params(table) for table in ordered.values())
    for dim in {table.embedding_dim for table in ordered.values()} if budget_params > 0 else ():
        # Each dimension gets a part of the budget in proportion to its tables' dense parameters.
        rows = {k: table.num_embeddings for k, table in ordered.items() if table.embedding_dim == dim}
        chosen = choose_hot_blocks(list(rows.values()), dim, sum(rows.values()) * dim / total * budget_params)
        for k, chosen_blocks in zip(rows, chosen, strict=True):
            blocks[k] = chosen_blocks
    return blocks


def _dense_params(table: BaseEmbeddingConfig) -> int:
    return table.num_embeddings * table.embedding_dim
