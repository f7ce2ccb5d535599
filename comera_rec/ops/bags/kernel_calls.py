"""The kernels of `triton.py` and `triton_updates.py`, called for one lookup: bags, sums over slices, and gradients or updates."""

import importlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from comera_rec.ops.launch import LEAST_RANK, ceil_div, rank_bucket
from comera_rec.ops.plan.reference import first_keys, kept, on_device


class Sums(NamedTuple):
    """Sums over the ids of each slice, and an id that uses the slice, -1 where none does."""

    left: Tensor
    """[P + chunks of ids, R n1] float32."""
    right: Tensor
    left_owners: Tensor
    """[P] int32."""
    right_owners: Tensor


class Ending(NamedTuple):
    """How a backward pass ends for some parameters: with gradients or with an update."""

    kind: str
    """"gradient" or the optimizer's class."""
    results: Sequence[Tensor]
    """Where gradients go, or the optimizer's states; the parameters themselves if it has none."""
    settings: Mapping[str, Any] = {}
    """Of the optimizer."""

    @property
    def lr(self) -> Tensor | None:
        """The learning rate if it is a tensor, which the device reads itself."""
        lr = self.settings.get("lr")
        return lr if isinstance(lr, Tensor) else None

    @property
    def rule(self) -> dict[str, float]:
        """The settings as kernels take them."""
        lr, eps, weight_decay = (self.settings.get(name, 0.0) for name in ("lr", "eps", "weight_decay"))
        return {"lr": 0.0 if isinstance(lr, Tensor) else lr, "eps": eps, "weight_decay": weight_decay}


@cache
def _kernels() -> tuple[Any, Any]:
    """The modules of kernels, which need triton to be installed."""
    return tuple(importlib.import_module(f"comera_rec.ops.bags.{name}") for name in ("triton", "triton_updates"))  # type: ignore[return-value]


class KernelTables:
    """Pairs of cores of T tables, as kernels take them: addresses and sizes, which lookups share.

    Rows are products of a slice of each. Columns of a slice that has a bond on its other side count that bond too, so a row is
    [a, n, c, n'] for slices (a, n, r) and (r, n', c).

    Args:
        cores: slice-major: the first ones (a, m, n, r) of all tables, then as many second ones (r, m', n', c).
        diagonals: T diagonals (r) or (r, 1), or none.
    """

    def __init__(self, cores: Sequence[Tensor], diagonals: Sequence[Tensor]) -> None:
        half = len(cores) // 2
        self._parameters = cores, diagonals  # whose memory is kept until backward, even if parameters are given other data
        self.sizes = [each.numel() for each in (*cores, *diagonals)]
        self.leading, self.trailing, self.first_diagonal = cores[0], cores[half], diagonals[0] if diagonals else cores[0]
        self.counts = tuple(sum(core.shape[1] for core in side) for side in (cores[:half], cores[half:]))
        self.are_scaled = bool(diagonals)
        (a, _, n1, _), (_, _, n2, c) = cores[0].shape, cores[-1].shape
        self.n1, self.n2 = a * n1, n2 * c
        self.ranks = [core.shape[3] for core in cores[:half]]
        self.are_aligned = all(
            _address(core) % 16 == 0 and core.shape[0] * core.shape[2] * core.shape[3] * core.element_size() % 16 == 0
            for core in cores
        )
        self._starts = _starts(cores[:half]), _starts(cores[half:])
        self._diagonal_starts = _starts(diagonals) if diagonals else [0] * half
        self._modes = [core.shape[1] for core in cores[half:]]
        self._columns = self._device_columns(self.ranks, *self._starts, self._diagonal_starts)
        self.rank = rank_bucket(max(self.ranks))
        self._ends: tuple[Sequence[Tensor], Sequence[Tensor], Tensor, bool] | None = None

    @property
    def columns(self) -> Tensor:
        """What forward kernels read about each table."""
        return kept(self._columns)

    def ends(self, cores: Sequence[Tensor], diagonals: Sequence[Tensor], is_kept: bool) -> tuple[Tensor, bool]:
        """Return what the last kernels of a backward read about each table, and whether all results are aligned.

        It is kept for results that stay the same, which gradients don't.
        """
        ends = self._ends if is_kept else None
        if ends is None or ends[0] is not cores or ends[1] is not diagonals:
            half = len(self.ranks)
            of_diagonals = _starts(diagonals) if diagonals else [0] * half
            columns = self._device_columns(
                self.ranks, self._diagonal_starts, *self._starts, _starts(cores[:half]), _starts(cores[half:]), of_diagonals,
                first_keys(self._modes)[:-1], self._modes,
            )  # fmt: skip
            ends = cores, diagonals, columns, all(_address(result) % 16 == 0 for result in cores)
            self._ends = ends if is_kept else None
        return kept(ends[2]), ends[3]

    def _device_columns(self, *columns: Sequence[int]) -> Tensor:
        return on_device(list(zip(*columns, strict=True)), self.leading.device)


class KernelCalls:
    """The tensors and sizes of a lookup, and methods that run its kernels."""

    def __init__(
        self, tables: KernelTables, plan: Sequence[Tensor], offsets: Tensor, weights: Tensor | None, mode: str, features: int,
        num_cols: int,
    ) -> None:  # fmt: skip
        self._kernels, self._updates = _kernels()
        self.tables = tables
        self._pairs, self._slices, self._order = plan
        self._offsets, self._weights = offsets, weights
        self.num_bags, self.num_ids = offsets.shape[0] - 1, self._pairs.shape[1]
        self._mode, self._features, self._num_cols = mode, features, num_cols
        self._sizes = self._kernels.Sizes(tables.n1, tables.rank, tables.n2, num_cols, tables.are_scaled, tables.are_aligned)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return bags and the target of each id [L], a row of the bags as a matrix [B * F, N]."""
        out = self.tables.leading.new_empty(self.num_bags // self._features, self._features * self._num_cols)
        targets = torch.empty(self.num_ids, dtype=torch.int32, device=out.device)
        if out.numel():
            self._pool(out, targets, self._offsets, self._weights, self._mode, self._features)
        return out, targets

    def _pool(self, out: Tensor, targets: Tensor, offsets: Tensor, weights: Tensor | None, mode: str, features: int) -> None:
        """Fill bags and targets."""
        tables, num_bags = self.tables, offsets.shape[0] - 1
        kernel, bags_at_once, programs_of_bag = self._kernels.pool_kernel(self._sizes, mode, weights is not None)
        kernel(
            (ceil_div(num_bags, bags_at_once), programs_of_bag),
            a_ptr=tables.leading, b_ptr=tables.trailing, d_ptr=tables.first_diagonal, tables_ptr=tables.columns,
            pairs_ptr=self._pairs, offsets_ptr=offsets, weights_ptr=tables.leading if weights is None else weights,
            out_ptr=out, targets_ptr=targets,
            num_ids=self.num_ids, num_bags=num_bags, bags_of_feature=num_bags // features,
        )  # fmt: skip

    def sum_slices(self, grad: Tensor, targets: Tensor) -> Sums:
        """Return sums over the ids of each slice."""
        tables, num_ids, chunk = self.tables, self.num_ids, self._kernels.CHUNK
        num_left, num_right = tables.counts
        right_start = -(-num_left // 4) * 4  # at a multiple of 16 bytes
        owners = torch.empty(right_start + num_right, dtype=torch.int32, device=grad.device)
        chunks = ceil_div(num_ids, chunk)
        widths = tables.rank * tables.n1, tables.rank * tables.n2  # multiples of 8, because ranks are
        left, right = (
            torch.empty(count + chunks, width, dtype=torch.float32, device=grad.device)
            for count, width in zip(tables.counts, widths, strict=True)
        )
        sizes = self._sizes if _address(grad) % 16 == 0 else self._sizes._replace(aligned=False)
        kernel, programs_of_chunk = self._kernels.slices_kernel(sizes, self._mode, self._weights is not None)
        kernel(
            (2 * chunks, programs_of_chunk),
            grad_ptr=grad, a_ptr=tables.leading, b_ptr=tables.trailing, tables_ptr=tables.columns, pairs_ptr=self._pairs,
            slices_ptr=self._slices, order_ptr=self._order, targets_ptr=targets, offsets_ptr=self._offsets,
            weights_ptr=tables.leading if self._weights is None else self._weights,
            left_ptr=left, right_ptr=right, owners_ptr=owners,
            num_ids=num_ids, num_bags=self.num_bags, bags_of_feature=self.num_bags // self._features,
            num_left=num_left, num_right=num_right, num_owners=owners.shape[0],
        )  # fmt: skip
        sums = Sums(left, right, owners[:num_left], owners[right_start:])
        group = self._updates.GROUP
        steps = zip((1, group) if chunks > group else (1,), self._updates.PARTS_AT_ONCE, strict=False)
        for step, at_once in steps:
            self._updates.parts_kernel(step, group, at_once)(
                (ceil_div(chunks, step), ceil_div(max(widths), self._updates.PART_COLUMNS), 2),
                left_ptr=left, right_ptr=right, left_owners_ptr=sums.left_owners, right_owners_ptr=sums.right_owners,
                slices_ptr=self._slices, order_ptr=self._order,
                num_ids=num_ids, num_left=num_left, num_right=num_right,
                eighth_left=widths[0] // 8, eighth_right=widths[1] // 8,
            )  # fmt: skip
        return sums

    def finish(self, sums: Sums, cores: Ending, diagonals: Ending | None) -> None:
        """Write the gradients of cores and diagonals or update them; `diagonals` is None if there are none."""
        tables, half = self.tables, len(self.tables.ranks)
        num_left, num_right = tables.counts
        results = cores.results, () if diagonals is None else diagonals.results
        columns, are_aligned = tables.ends(*results, is_kept=cores.kind != "gradient")
        products = torch.empty(
            num_right if tables.are_scaled else 0, tables.rank, dtype=torch.float32, device=tables.leading.device
        )
        seed = self._seed(cores, diagonals)
        sizes = self._sizes if are_aligned else self._sizes._replace(aligned=False)
        at_once = self._updates.SLICES_AT_ONCE
        self._updates.finish_kernel(sizes, cores.kind, cores.lr is not None)(
            (ceil_div(num_left, at_once) + ceil_div(num_right, at_once),),
            left_ptr=sums.left, right_ptr=sums.right, left_owners_ptr=sums.left_owners, right_owners_ptr=sums.right_owners,
            tables_ptr=columns, pairs_ptr=self._pairs, a_ptr=tables.leading, b_ptr=tables.trailing, d_ptr=tables.first_diagonal,
            left_result_ptr=cores.results[0], right_result_ptr=cores.results[half], products_ptr=products,
            lr_ptr=sums.left if cores.lr is None else cores.lr, seed_ptr=seed,
            num_ids=self.num_ids, num_left=num_left, num_right=num_right, rank_limit=tables.rank, **cores.rule,
        )  # fmt: skip
        if diagonals is not None:
            self._updates.diagonals_kernel(diagonals.kind, diagonals.lr is not None)(
                (half, ceil_div(tables.rank, LEAST_RANK)),
                products_ptr=products, tables_ptr=columns, d_ptr=tables.first_diagonal, result_ptr=diagonals.results[0],
                lr_ptr=sums.left if diagonals.lr is None else diagonals.lr, seed_ptr=seed,
                rank_limit=tables.rank, **diagonals.rule,
            )  # fmt: skip

    def _seed(self, *endings: Ending | None) -> Tensor:
        """Draw the seed for rounding updates on the device, [1] int64; return any tensor where nothing is updated or rounded."""
        leading = self.tables.leading
        if leading.dtype == torch.float32 or all(ending is None or ending.kind == "gradient" for ending in endings):
            return self._order
        return torch.randint(1 << 60, (1,), device=leading.device)

    def gradients_of_weights(self, grad: Tensor, targets: Tensor) -> Tensor:
        """Return the gradients of the weights, [L]: of each id its row times its bag's gradient; 0 for ids in no bag."""
        numbers = torch.arange(self.num_ids + 1, device=grad.device)
        rows = grad.new_empty(self.num_ids, self._num_cols, dtype=torch.float32)
        self._pool(rows, torch.empty_like(targets), numbers, None, "sum", 1)
        is_pooled = numbers[:-1] < self._offsets[-1]
        of_bags = grad.reshape(-1, self._num_cols).index_select(0, torch.where(is_pooled, targets, 0))
        return torch.where(is_pooled, rows.mul_(of_bags).sum(1), 0.0).to(grad.dtype)


def _starts(tensors: Sequence[Tensor]) -> list[int]:
    """Return where each tensor starts, in elements from the start of the first; 0 for empty tensors, which have no address."""
    first = _address(tensors[0])
    return [(_address(tensor) - first) // tensor.element_size() if tensor.numel() else 0 for tensor in tensors]


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr()
