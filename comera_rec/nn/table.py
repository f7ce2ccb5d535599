"""What tensor-train tables share, whether their rows are pooled or not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from comera_rec.nn.tt_module import TTModule
from comera_rec.ops import LookupPlan, check_ids, plan_lookup
from comera_rec.ops.bags import require_bags_impl, resolve_bags_impl
from comera_rec.ops.bags.updates import register_update
from comera_rec.tt import TTShape, require_positive, slice_major


class TTTable(TTModule):
    """An embedding table held as a tensor-train matrix.

    E[i, (j_1..j_d)] = G_1[0, i_1, j_1, :] diag(D_1) G_2[:, i_2, j_2, :] ... G_d[:, i_d, j_d, 0]

    Args:
        num_embeddings: rows M of the table.
        embedding_dim: columns N.
        shape: modes and ranks; default `TTShape.for_table(num_embeddings, embedding_dim, tt_ranks=tt_ranks)`.
        tt_ranks: ranks, one for all bonds or one each; default 16. Give at most one of `shape` and `tt_ranks`.
        impl: implementation of the products, see `comera_rec.ops.tt_bags`.
        std: standard deviation of the entries at initialization.
        name: the table's name in error messages.

    Raises:
        ValueError: for sizes or ranks below 1, a shape too small for the table.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        shape: TTShape | None = None,
        tt_ranks: int | Sequence[int] | None = None,
        impl: str = "auto",
        std: float = 1.0,
        name: str = "the table",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        require_positive(num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        require_bags_impl(impl)
        shape = table_shape(num_embeddings, embedding_dim, shape, tt_ranks)
        super().__init__(num_embeddings, embedding_dim, shape, std, device=device, dtype=dtype)
        self.impl = impl
        self.name = name
        self.reset_parameters()

    def laid_out(self, k: int, core: Tensor) -> Tensor:
        return slice_major(core, k, self.shape.order)

    def plan(self, ids: Tensor) -> LookupPlan:
        """What a lookup of ids, of any shape, will compute.

        Raises:
            ValueError: naming the table, the id and the limit, if an id is out of range (checked on CPU); for ids of another type
                than int32 or int64.
        """
        return plan_tables([[ids]], [self], [[self.name]], impl=self.impl)

    @property
    def num_embeddings(self) -> int:
        """Rows M of the table."""
        return self.num_rows

    @property
    def embedding_dim(self) -> int:
        """Columns N of the table."""
        return self.num_cols


def update_in_backward_(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Let an optimizer update the cores of a model's TT tables in backward, slice by slice, instead of in its `step`.

    A batch meets few slices. On CPU only these then get a gradient, which stays in the cache, and only their parameters and state
    are read and written. With SGD and Adagrad it makes no difference to what is learned; Adam's moments decay in the steps that
    meet a slice only, as `torch.optim.SparseAdam`'s do. Settings such as the learning rate are read in every step, and the state is
    the optimizer's own, so schedulers, checkpoints and `truncate_ranks_` need not know.
    Cores have no `grad` afterwards: don't clip it, accumulate it over batches, or put a penalty on cores into the loss.

    Args:
        model: any module. Tables that are replicated by data parallelism, on other devices, or of float64 keep their gradients.
        optimizer: holds the cores; SGD without momentum, Adagrad or Adam (without amsgrad).

    Raises:
        ValueError: if there is no TT table whose cores the optimizer holds and can update so.

    Returns:
        The tables' names.
    """
    updated = []
    for name, table in model.named_modules():
        if isinstance(table, TTTable) and sum(register_update(core, optimizer) for core in table.cores()) == table.shape.order:
            updated.append(name)
    if not updated:
        raise ValueError(
            f"no TT table's cores are updated by this {type(optimizer).__name__}: give the optimizer that holds them, "
            "SGD without momentum, Adagrad or Adam without amsgrad"
        )
    return updated


def plan_tables(
    ids: Sequence[Sequence[Tensor]],
    tables: Sequence[TTTable],
    names: Sequence[Sequence[str]],
    *,
    impl: str = "auto",
    parallel: bool = True,
) -> LookupPlan:
    """The plan of a lookup over several tables.

    Args:
        ids: per table those of each of its features.
        tables: of as many cores each.
        names: per table that of each of its features, for errors.
        impl: of the lookup.
        parallel: as for `plan_lookup`.

    Raises:
        ValueError: as `TTTable.plan`.
    """
    shapes, rows = [table.shape.row_shape for table in tables], [table.num_embeddings for table in tables]
    joined = [features[0] if len(features) == 1 else torch.cat(list(features)) for features in ids]
    plan_impl = (
        "auto" if resolve_bags_impl(impl, tables[0].core_0.device, tables[0].core_0.dtype, len(shapes[0])) == "cpu" else "reference"
    )
    if plan_impl == "auto":
        try:
            return plan_lookup(joined, shapes, rows, parallel=parallel)
        except ValueError:
            _check_ids(ids, tables, names)
            raise
    _check_ids(ids, tables, names)
    return plan_lookup(joined, shapes, rows, impl=plan_impl)


def _check_ids(ids: Sequence[Sequence[Tensor]], tables: Sequence[TTTable], names: Sequence[Sequence[str]]) -> None:
    for features, table, names_of in zip(ids, tables, names, strict=True):
        for feature, name in zip(features, names_of, strict=True):
            check_ids(feature, table.num_embeddings, name)


def table_shape(num_embeddings: int, embedding_dim: int, shape: TTShape | None, tt_ranks: int | Sequence[int] | None) -> TTShape:
    """The shape given, or the default one of a table at the given ranks; both is a ValueError."""
    if shape is not None and tt_ranks is not None:
        raise ValueError(f"shape {shape} and tt_ranks {tt_ranks} are both given: give one of them")
    if shape is not None and shape.order > 4:
        raise ValueError(f"shape {shape} has {shape.order} cores: embedding tables take at most 4")
    return shape or TTShape.for_table(num_embeddings, embedding_dim, tt_ranks=tt_ranks)


def require_plain_rows(module: nn.Embedding | nn.EmbeddingBag) -> None:
    """Raise a ValueError if a dense table treats some rows in a way that a train can't honour."""
    if module.padding_idx is not None or module.max_norm is not None or module.scale_grad_by_freq:
        raise ValueError(
            "padding_idx, max_norm and scale_grad_by_freq have no tensor-train equivalent: "
            f"build the {type(module).__name__} without them"
        )
