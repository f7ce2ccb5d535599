"""The kernels of `triton.py` and `triton_updates.py`, called for one lookup: bags, sums over slices, and gradients or updates."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from comera_rec.ops.launch import rank_bucket
from comera_rec.ops.plan.reference import first_keys, on_device


class KernelCalls:
    """The tensors and sizes of a lookup, and methods that run its kernels."""

    def __init__(
        self, cores: Sequence[Tensor], diagonals: Sequence[Tensor], plan: Sequence[Tensor], counts: Sequence[int], offsets: Tensor,
        weights: Tensor | None, mode: str, features: int, num_cols: int,
    ) -> None:  # fmt: skip
        self._kernels = importlib.import_module("comera_rec.ops.bags.triton")  # needs triton to be installed
        self._updates = importlib.import_module("comera_rec.ops.bags.triton_updates")
        half = len(cores) // 2
        self._sides = list(cores[:half]), list(cores[half:])
        self._diagonals = list(diagonals)
        self._pairs, self._slices, self._order = plan
        self._offsets, self._weights = offsets, weights
        self.first = cores[0]
        self.ranks = [core.shape[3] for core in self._sides[0]]
        self.num_bags, self.num_ids = offsets.shape[0] - 1, self._pairs.shape[1]
        self._bag_counts = {"num_bags": self.num_bags, "features": features}
        self._pooling = {"mode": mode, "weighted": weights is not None}
        aligned = all(
            _address(core) % 16 == 0 and core.shape[0] * core.shape[2] * core.shape[3] * core.element_size() % 16 == 0
            for core in cores
        )
        self.sizes = self._kernels.Sizes(
            num_ids=self.num_ids, counts=tuple(counts), n1=cores[0].shape[2], rank=rank_bucket(max(self.ranks)),
            n2=cores[-1].shape[2], num_cols=num_cols, scaled=bool(diagonals),
            aligned=aligned,
        )  # fmt: skip
        columns = zip(self.ranks, *map(_starts, self._sides), self._diagonal_starts(), strict=True)
        self._tables = on_device(list(columns), self.first.device)

    def _diagonal_starts(self) -> list[int]:
        return _starts(self._diagonals) if self._diagonals else [0] * len(self.ranks)

    @property
    def _operands(self) -> dict[str, Tensor]:
        """Return the tensors that kernels need to form rows."""
        diagonal = self._diagonals[0] if self._diagonals else self.first
        left, right = self._sides[0][0], self._sides[1][0]
        return {"a_ptr": left, "b_ptr": right, "d_ptr": diagonal, "tables_ptr": self._tables, "pairs_ptr": self._pairs}

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return bags, the target of each id [L] and, for mode "max", the position of the id that each entry comes from.

        A target is a row of the bags as a matrix [B * F, N].
        """
        features, num_cols = self._bag_counts["features"], self.sizes.num_cols
        out = self.first.new_empty(self.num_bags // features, features * num_cols)
        targets = torch.empty(self.num_ids, dtype=torch.int32, device=out.device)
        rows = self.num_bags if self._pooling["mode"] == "max" else 0
        chosen = torch.empty(rows, num_cols, dtype=torch.int32, device=out.device)
        if out.numel():
            self._kernels.pool_launch(self.sizes, **self._bag_counts, **self._pooling)(
                **self._operands, offsets_ptr=self._offsets, weights_ptr=self.first if self._weights is None else self._weights,
                out_ptr=out, targets_ptr=targets, chosen_ptr=chosen,
            )  # fmt: skip
        return out, targets, chosen

    def sum_slices(self, grad: Tensor, targets: Tensor, chosen: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return, for each side, sums over the ids of each slice, and an id that uses the slice, -1 where none does."""
        sizes, (num_left, num_right) = self.sizes, self.sizes.counts
        right_start = -(-num_left // 4) * 4  # at a multiple of 16 bytes
        owners = torch.empty(right_start + num_right, dtype=torch.int32, device=grad.device)
        left_owners, right_owners = owners[:num_left], owners[right_start:]
        chunks = -(-self.num_ids // self._kernels.CHUNK)
        left, right = (
            torch.empty(count + chunks, sizes.rank * size, dtype=torch.float32, device=grad.device)
            for count, size in zip(sizes.counts, (sizes.n1, sizes.n2), strict=True)
        )
        sizes = replace(sizes, aligned=sizes.aligned and _address(grad) % 16 == 0)
        self._kernels.slices_launch(sizes, **self._bag_counts, **self._pooling)(
            grad_ptr=grad, a_ptr=self._sides[0][0], b_ptr=self._sides[1][0], tables_ptr=self._tables, pairs_ptr=self._pairs,
            slices_ptr=self._slices, order_ptr=self._order, targets_ptr=targets, offsets_ptr=self._offsets,
            weights_ptr=self.first if self._weights is None else self._weights, chosen_ptr=chosen,
            left_ptr=left, right_ptr=right,
        )  # fmt: skip
        self._updates.parts_launch(sizes)(
            left_ptr=left, right_ptr=right, left_owners_ptr=left_owners, right_owners_ptr=right_owners,
            slices_ptr=self._slices, order_ptr=self._order,
        )  # fmt: skip
        return [(left, left_owners), (right, right_owners)]

    def finish(
        self, side: int, sums: tuple[Tensor, Tensor], results: Sequence[Tensor], products: Tensor | None, kind: str,
        settings: dict[str, Any],
    ) -> None:  # fmt: skip
        """Write gradients to `results` or, unless `kind` is "gradient", update the cores, whose states `results` are."""
        lr, numbers = _split_settings(settings)
        columns = zip(self.ranks, _starts(self._sides[side]), self._diagonal_starts(), _starts(results), strict=True)
        sizes = replace(self.sizes, aligned=self.sizes.aligned and all(_address(result) % 16 == 0 for result in results))
        launch = self._updates.finish_launch(
            sizes, side, kind, numbers, of_diagonal=products is not None, lr_in_tensor=lr is not None
        )
        parts, owners = sums
        launch(
            parts_ptr=parts, tables_ptr=on_device(list(columns), parts.device), pairs_ptr=self._pairs, owners_ptr=owners,
            core_ptr=self._sides[side][0], d_ptr=self._operands["d_ptr"], result_ptr=results[0],
            products_ptr=parts if products is None else products, lr_ptr=parts if lr is None else lr,
            seed_ptr=self._seed(),
        )  # fmt: skip

    def finish_diagonals(
        self, products: Tensor, owners: Tensor, results: Sequence[Tensor], kind: str, settings: dict[str, Any]
    ) -> None:
        """Do for the diagonals what `finish` does for cores."""
        lr, numbers = _split_settings(settings)
        counts = [core.shape[1] for core in self._sides[1]]
        zero = [0] * len(counts)
        columns = zip(self.ranks, zero, self._diagonal_starts(), _starts(results), first_keys(counts), counts, strict=False)
        self._updates.diagonals_launch(self.sizes, len(counts), kind, numbers, lr_in_tensor=lr is not None)(
            products_ptr=products, owners_ptr=owners, tables_ptr=on_device(list(columns), products.device),
            d_ptr=self._diagonals[0], result_ptr=results[0], lr_ptr=products if lr is None else lr, seed_ptr=self._seed(),
        )  # fmt: skip

    def _seed(self) -> Tensor:
        """Draw the seed for rounding updates on the device, [1] int64; return any tensor where nothing is rounded."""
        if self.first.dtype == torch.float32:
            return self._order
        return torch.randint(1 << 60, (1,), device=self.first.device)

    def products(self) -> Tensor | None:
        """Allocate what each trailing slice contributes to the diagonal's gradient; None without diagonals."""
        if not self._diagonals:
            return None
        return torch.empty(self.sizes.counts[1], self.sizes.rank, dtype=torch.float32, device=self.first.device)

    def gradients_of_weights(self, grad: Tensor, targets: Tensor) -> Tensor:
        """Return the gradients of the weights, [L]."""
        out = grad.new_empty(self.num_ids)
        launch = self._kernels.weights_launch(self.sizes, num_bags=self.num_bags)
        launch(grad_ptr=grad, **self._operands, targets_ptr=targets, offsets_ptr=self._offsets, out_ptr=out)
        return out


def _split_settings(settings: dict[str, Any]) -> tuple[Tensor | None, dict[str, float]]:
    """Return the learning rate if it is a tensor, which the device reads itself, and all settings as numbers."""
    lr = settings["lr"]
    return (lr, {**settings, "lr": 0.0}) if isinstance(lr, Tensor) else (None, settings)


def _starts(tensors: Sequence[Tensor]) -> list[int]:
    """Return where each tensor starts, in elements from the start of the first."""
    first = _address(tensors[0])
    return [(_address(tensor) - first) // tensor.element_size() for tensor in tensors]


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr()
