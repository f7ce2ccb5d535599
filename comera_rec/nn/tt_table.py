"""TT tables: the base of `TTEmbeddingBag` and `TTEmbedding`, and functions for any of them."""

from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from comera_rec.nn.hot_rows import HotRows, require_blocks
from comera_rec.nn.tt_module import TTModule, std_of
from comera_rec.ops import LookupPlan, PairPlan, check_ids, plan_lookup
from comera_rec.ops.bags import Table, TableGroup, require_bags_impl, resolve_bags_impl
from comera_rec.ops.bags.kept import UntilChanged
from comera_rec.ops.bags.updates import can_update, register_update, unregister_update
from comera_rec.tt import TTShape, require_positive, slice_major
from data_pipeline.errors import UserError


class TTTable(TTModule):
    """An embedding table stored as a TT matrix, with optional hot rows added for its most frequent ids.

    E[i, (j_1..j_d)] = G_1[0, i_1, j_1, :] diag(D_1) G_2[:, i_2, j_2, :] ... G_d[:, i_d, j_d, 0]  (+ A[i] diag(D) P)

    Args:
        hot_rows: blocks (rows, width) of ids from 0 on, for ids that are ordered by frequency; see `HotRows`.
        row_order: [M] integers, a permutation: id i has row row_order[i] of the cores and of hot rows, kept as an int32 buffer. For
            ids that can't be numbered anew such that similar ones are neighbors; see `comera_rec.similarity_order`.
        num_embeddings, embedding_dim, others: see `TTEmbeddingBag`.

    Raises:
        ValueError: for sizes, ranks or widths below 1, a shape too small for the table, more hot rows than rows, or a row order
            that isn't a permutation of the table's rows.
    """

    hot_rows: nn.ModuleList
    row_order: Tensor | None
    first_row = 0
    """Row of the whole table that id 0 of this module refers to; above 0 in shards only."""
    _KEPT: tuple[str, ...] = ()
    """Options that the table has in common with the dense module that it replaces."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        shape: TTShape | None = None,
        tt_ranks: int | Sequence[int] | None = None,
        hot_rows: Sequence[tuple[int, int]] = (),
        row_order: Tensor | None = None,
        impl: str = "auto",
        std: float = 1.0,
        name: str = "the table",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        require_positive(num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        require_bags_impl(impl)
        require_blocks(hot_rows := tuple(hot_rows), num_embeddings)
        shape = table_shape(num_embeddings, embedding_dim, shape, tt_ranks)
        super().__init__(num_embeddings, embedding_dim, shape, std, device=device, dtype=dtype)
        self.impl = impl
        self.name = name
        self._group: UntilChanged[TableGroup] = UntilChanged()
        self.hot_rows = nn.ModuleList()
        self.reset_parameters()
        for rows, width in hot_rows:
            self.hot_rows.append(HotRows(self.num_hot_rows, rows, embedding_dim, width, std=std, device=device, dtype=dtype))
        self.register_buffer("row_order", None)
        if row_order is not None:
            self.set_row_order_(row_order)

    def set_row_order_(self, row_order: Tensor) -> None:
        """Set `row_order`, see the class; the table's values stay where they are, so ids get other rows."""
        rows = self.num_embeddings
        if self.core_0.is_meta:
            raise UserError(f"{self.name} is on the meta device, which keeps no row order: set it after values are allocated")
        if (
            row_order.shape != (rows,)
            or row_order.is_floating_point()
            or not row_order.sort().values.equal(torch.arange(rows, dtype=row_order.dtype, device=row_order.device))
        ):
            raise UserError(
                f"the row order of {self.name} has shape {tuple(row_order.shape)}: give each of the numbers 0 to {rows - 1} once"
            )
        self.row_order = row_order.to(self.core_0.device, torch.int32)

    @property
    def lookup_order(self) -> Tensor | None:
        """The order that lookups, of ids as they are given to this table, follow; None if ids are rows."""
        return self._buffers["row_order"]  # faster than an attribute, of which a batch looks up many

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        stored, errors = state_dict.get(f"{prefix}row_order"), others[-1]
        before, count = self.row_order, len(errors)
        if stored is not None and before is None and stored.shape == (self.num_embeddings,):
            self.row_order = torch.empty_like(stored, device=self.core_0.device)
        super()._load_from_state_dict(state_dict, prefix, *others)
        if len(errors) > count:
            self.row_order = before

    def reset_parameters(self) -> None:
        """Redraw the cores with `std`, and set hot rows to zero."""
        super().reset_parameters()
        for rows in self.hot_blocks():
            rows.reset_parameters()

    def laid_out(self, k: int, core: Tensor) -> Tensor:
        return slice_major(core, k, self.shape.order)

    def forward_parameters(self) -> Table:
        """Return the parameters in the form that a lookup takes.

        Raises:
            ValueError: for a table in a FullyShardedDataParallel, which reads gradients of cores in another order than they have.
        """
        cores = self.cores()
        if type(cores[0]) is Tensor and getattr(cores[0]._base, "_is_flat_param", False):
            raise UserError(
                f"{self.name} is in a FullyShardedDataParallel, which mixes up the gradients of cores: leave it out by "
                "ignored_modules, and replicate it or shard it by TorchRec"
            )
        return Table(cores, self.rank_parameters(), [rows.block() for rows in self.hot_blocks()], self.first_row)

    def group(self) -> TableGroup:
        """Return the table in the form that a lookup of it alone takes."""
        return self._group.get(self.lookup_parameters(), lambda: TableGroup([self.forward_parameters()]))

    def _apply(self, *arguments: Any, **options: Any) -> Self:
        self._group.clear()  # parameters may move, and leave memory behind
        return super()._apply(*arguments, **options)

    def lookup_parameters(self) -> list[Any]:
        """List what lookups read, hot rows included."""
        blocks: Any = self._modules["hot_rows"]  # faster than attributes
        parameters = list(self._parameters.values())
        for rows in blocks._modules.values():
            parameters += rows._parameters.values()
        return parameters

    def hot_blocks(self) -> Iterator[HotRows]:
        """Yield the blocks of `hot_rows`, the most frequent ids first."""
        for rows in self.hot_rows:
            assert isinstance(rows, HotRows)
            yield rows

    @property
    def num_hot_rows(self) -> int:
        """Number of hot rows: those of the ids below this number."""
        return sum(rows.num_rows for rows in self.hot_blocks())

    def hot_matrix(self) -> Tensor:
        """Return what hot rows add to the first rows of the cores' matrix, [num_hot_rows, N]; differentiable."""
        return torch.cat([self.core_0.new_empty(0, self.num_cols), *(rows.dense_matrix() for rows in self.hot_blocks())])

    def dense_matrix(self) -> Tensor:
        """Return the rows of all ids, [num_rows, num_cols]; differentiable."""
        matrix = super().dense_matrix()
        hot = self.hot_matrix()[self.first_row : self.first_row + self.num_rows]
        if len(hot):
            matrix = matrix + F.pad(hot, (0, 0, 0, self.num_rows - len(hot)))
        return matrix if self.lookup_order is None else matrix[self.lookup_order]

    def set_dense_matrix_(self, matrix: Tensor, *, rtol: float = 0.0) -> None:
        """Set the cores to the TT-SVD of the rows of all ids [num_rows, num_cols]; see `TTModule`."""
        super().set_dense_matrix_(self.by_row(matrix), rtol=rtol)

    def by_row(self, values: Tensor) -> Tensor:
        """Return values of ids [M, ...] in the order of their rows."""
        return values if self.lookup_order is None else values[self.lookup_order.argsort().to(values.device)]

    @classmethod
    def from_dense(
        cls,
        module: nn.Embedding | nn.EmbeddingBag,
        *,
        shape: TTShape | None = None,
        tt_ranks: int | Sequence[int] | None = None,
        rtol: float = 0.0,
    ) -> Self:
        """Return the TT-SVD of a dense table, see `comera_rec.tt.tt_svd`; `comera_rec.convert.fit_tables_` also fits hot rows.

        Raises:
            ValueError: as `like`.
        """
        table = cls.like(module, shape=shape, tt_ranks=tt_ranks)
        table.set_dense_matrix_(module.weight.detach(), rtol=rtol)
        return table

    @classmethod
    def like(cls, module: nn.Embedding | nn.EmbeddingBag, **sizes: Any) -> Self:
        """Return a random table of a dense table's sizes, options and standard deviation; `sizes`: shape or tt_ranks, hot_rows.

        Raises:
            ValueError: for options that a TT table lacks: a norm limit, frequency-scaled gradients, a padding index of an
                `nn.EmbeddingBag`, or a padding row of an `nn.Embedding` that isn't zero.
        """
        require_plain_rows(module)
        weight: Tensor = module.weight
        std = std_of(weight)
        options = sizes | {name: getattr(module, name) for name in cls._KEPT}
        return cls(
            len(weight), weight.shape[1], std=1.0 if std is None else std, device=weight.device, dtype=weight.dtype, **options
        )

    def plan(self, ids: Tensor) -> LookupPlan | PairPlan:
        """Plan a lookup of ids of any shape.

        Raises:
            ValueError: naming the table, the id and the limit, if an id is out of range (checked on CPU); for ids of another type
                than a tensor of int32 or int64.
        """
        if not isinstance(ids, Tensor):
            raise UserError(f"ids of {self.name} are a {type(ids).__name__}: give a tensor")
        return plan_tables([[ids]], [self], [[self.name]], impl=self.impl)

    def can_update_slices(self) -> bool:
        """Whether lookups can update cores slice by slice: not in float64, and not those of the implementation "reference"."""
        return resolve_bags_impl(self.impl, self.core_0.device, self.core_0.dtype, self.shape.order) != "reference"

    @property
    def num_embeddings(self) -> int:
        """Rows M of the table."""
        return self.num_rows

    @property
    def embedding_dim(self) -> int:
        """Columns N of the table."""
        return self.num_cols


def update_in_backward_(model: nn.Module, optimizer: Optimizer | None) -> list[str]:
    """Let an optimizer update the cores of a model's TT tables in backward, slice by slice, instead of in its `step`.

    A batch uses few slices. Only these then get a gradient, which on CPU stays in the cache, and only their parameters and state
    are read and written. On a GPU this holds for tables of order 2 and hot rows, updated by SGD or Adagrad without learning rate
    decay; cores of other tables keep their gradients there. SGD and Adagrad without weight decay give the same results as in
    `step`; weight decay, and the decay of Adam's moments, act only in steps that use the slice, as with `torch.optim.SparseAdam`.
    Settings such as the learning rate are read in every step and the state stays in the optimizer, so schedulers, checkpoints and
    `truncate_ranks_` work as before.

    Compiled models can't do this: there, cores get gradients for the optimizer's `step`, which has to be called.

    Cores have no `grad` afterwards: gradients can't be clipped, accumulated over batches or scaled (`GradScaler`). If a core gets
    one from another use, such as a penalty or an output layer that is tied to the table, the lookup's backward raises. A table that
    is looked up twice in a step is updated twice, by the gradients at the cores that each backward finds. Before another optimizer
    takes over the cores, call this again with it, or with None.

    Cores of bfloat16 or float16, and their optimizer state, are rounded stochastically: steps too small to change the rounded
    number still add up, as they do in float32.

    Args:
        model: any module. Tables in float64, of order 1, or replicated by data parallelism, keep their gradients.
        optimizer: the optimizer of the cores; SGD without momentum, Adagrad, Adam or AdamW (without amsgrad, and not of float16),
            or TorchRec's `RowWiseAdagrad`. With None, cores have gradients again.

    Raises:
        ValueError: if the optimizer can update no TT table this way.

    Returns:
        The names of the tables updated in backward.
    """
    updated = []
    for name, table in model.named_modules():
        if isinstance(table, TTTable):
            cores = [core for module in (table, *table.hot_blocks()) for core in module.cores()]
            if optimizer is None:
                for core in cores:
                    unregister_update(core)
            elif table.can_update_slices() and all(can_update(core, optimizer) for core in cores):
                for core in cores:
                    register_update(core, optimizer)
                updated.append(name)
    if not updated and optimizer is not None:
        raise UserError(
            f"no TT table's cores are updated by this {type(optimizer).__name__}: give the optimizer of the cores, "
            "SGD without momentum, Adagrad, RowWiseAdagrad, Adam or AdamW without amsgrad, the last two not of float16"
        )
    return updated


def plan_tables(
    ids: Sequence[Sequence[Tensor]],
    tables: Sequence[TTTable],
    names: Sequence[Sequence[str]],
    *,
    impl: str = "auto",
) -> LookupPlan | PairPlan:
    """Plan a lookup over several tables.

    Args:
        ids: per table and feature, integer ids [L].
        tables: tables with the same number of cores.
        names: per table and feature, its name in error messages.
        impl: implementation of the lookup.

    Raises:
        ValueError: as `TTTable.plan`.
    """
    shapes, rows = [table.shape.row_shape for table in tables], [table.num_embeddings for table in tables]
    if any(table.lookup_order is not None for table in tables):
        if ids[0][0].device.type == "cpu" and type(ids[0][0]) is Tensor:
            _check_ids(ids, tables, names)
        orders = [table.lookup_order for table in tables]
        ids = [
            features if order is None else [_rows_of(order, feature) for feature in features]
            for features, order in zip(ids, orders, strict=True)
        ]
    joined = [features[0] if len(features) == 1 else torch.cat(list(features)) for features in ids]
    plan_impl = resolve_bags_impl(impl, tables[0].core_0.device, tables[0].core_0.dtype, len(shapes[0]))
    if plan_impl == "cpu":
        try:
            return plan_lookup(joined, shapes, rows)
        except ValueError:
            _check_ids(ids, tables, names)
            raise
    if joined[0].device.type == "cpu" and type(joined[0]) is Tensor:
        _check_ids(ids, tables, names)
    elif plan_impl != "triton":  # its plan checks ids itself
        for table_ids, count in zip(joined, rows, strict=True):
            check_ids(table_ids, count, "a table")
    return plan_lookup(joined, shapes, rows, impl=plan_impl)


def _rows_of(order: Tensor, ids: Tensor) -> Tensor:
    index = ids.long()
    if torch.compiler.is_compiling():  # an index out of range, which is reported, would end the process in a parallel loop
        index = index.clamp(0, len(order) - 1)
    return order[index].to(ids.dtype)


def _check_ids(ids: Sequence[Sequence[Tensor]], tables: Sequence[TTTable], names: Sequence[Sequence[str]]) -> None:
    for features, table, feature_names in zip(ids, tables, names, strict=True):
        for feature, name in zip(features, feature_names, strict=True):
            check_ids(feature, table.num_embeddings, name)


def table_shape(num_embeddings: int, embedding_dim: int, shape: TTShape | None, tt_ranks: int | Sequence[int] | None) -> TTShape:
    """Return the given shape, or the default one at the given ranks; raise ValueError if both are given."""
    if shape is not None and tt_ranks is not None:
        raise UserError(f"shape {shape} and tt_ranks {tt_ranks} are both given: give one of them")
    if shape is not None and shape.order > 4:
        raise UserError(f"shape {shape} has {shape.order} cores: embedding tables take at most 4")
    return shape or TTShape.for_table(num_embeddings, embedding_dim, tt_ranks=tt_ranks)


def require_plain_rows(module: nn.Embedding | nn.EmbeddingBag) -> None:
    """Raise ValueError if a dense table has options that a TT table lacks."""
    if module.max_norm is not None or module.scale_grad_by_freq:
        raise UserError(
            f"max_norm and scale_grad_by_freq have no equivalent in a TT table: build the {type(module).__name__} without them"
        )
    if module.padding_idx is None:
        return
    if isinstance(module, nn.EmbeddingBag):
        raise UserError("a TT table can't leave padding_idx out of bags: build the EmbeddingBag without it")
    if not module.weight.is_meta and module.weight[module.padding_idx].any():
        raise UserError(f"the row of padding_idx {module.padding_idx} isn't zero, and TT tables need a zero row: set it to zero")
