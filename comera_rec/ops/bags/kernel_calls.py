"""The kernels of `triton.py` and `triton_updates.py`, called for one lookup: bags, sums over slices, and gradients or updates."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from comera_rec.ops.launch import rank_bucket
from comera_rec.ops.plan.reference import first_keys, on_device


class Sums(NamedTuple):
    """Sums over the ids of each slice, and an id that uses the slice, -1 where none does."""

    left: Tensor
    """[P + chunks of ids, R n1] float32."""
    right: Tensor
    left_owners: Tensor
    """[P] int32."""
    right_owners: Tensor

    @property
    def operands(self) -> dict[str, Tensor]:
        """The arguments of kernels."""
        return {f"{name}_ptr": tensor for name, tensor in self._asdict().items()}


class Ending(NamedTuple):
    """How a backward pass ends for some parameters: with gradients or with an update."""

    kind: str
    """"gradient" or the optimizer's class."""
    results: Sequence[Tensor]
    """Where gradients go, or the optimizer's states; the parameters themselves if it has none."""
    settings: Mapping[str, Any] = {"lr": 0.0, "eps": 0.0, "weight_decay": 0.0}

    @property
    def lr(self) -> Tensor | None:
        """The learning rate if it is a tensor, which the device reads itself."""
        lr = self.settings["lr"]
        return lr if isinstance(lr, Tensor) else None

    @property
    def numbers(self) -> dict[str, float]:
        """The settings; the learning rate is 0 if it is a tensor."""
        return {**self.settings, "lr": 0.0 if self.lr is not None else self.settings["lr"]}


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
        self._pooling: dict[str, Any] = {"mode": mode, "weighted": weights is not None}
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

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return bags and the target of each id [L], a row of the bags as a matrix [B * F, N]."""
        features, num_cols = self._bag_counts["features"], self.sizes.num_cols
        out = self.first.new_empty(self.num_bags // features, features * num_cols)
        targets = torch.empty(self.num_ids, dtype=torch.int32, device=out.device)
        if out.numel():
            self._pool(out, targets, self._offsets, self._weights, self._pooling["mode"], features)
        return out, targets

    def _pool(self, out: Tensor, targets: Tensor, offsets: Tensor, weights: Tensor | None, mode: str, features: int) -> None:
        """Fill bags and targets."""
        diagonal = self._diagonals[0] if self._diagonals else self.first
        self._kernels.pool_launch(
            self.sizes, num_bags=len(offsets) - 1, features=features, mode=mode, weighted=weights is not None
        )(
            a_ptr=self._sides[0][0], b_ptr=self._sides[1][0], d_ptr=diagonal, tables_ptr=self._tables, pairs_ptr=self._pairs,
            offsets_ptr=offsets, weights_ptr=self.first if weights is None else weights, out_ptr=out, targets_ptr=targets,
        )  # fmt: skip

    def sum_slices(self, grad: Tensor, targets: Tensor) -> Sums:
        """Return sums over the ids of each slice."""
        num_left, num_right = self.sizes.counts
        right_start = -(-num_left // 4) * 4  # at a multiple of 16 bytes
        owners = torch.empty(right_start + num_right, dtype=torch.int32, device=grad.device)
        chunks = -(-self.num_ids // self._kernels.CHUNK)
        left, right = (
            torch.empty(count + chunks, self.sizes.rank * size, dtype=torch.float32, device=grad.device)
            for count, size in zip(self.sizes.counts, (self.sizes.n1, self.sizes.n2), strict=True)
        )
        sizes = replace(self.sizes, aligned=self.sizes.aligned and _address(grad) % 16 == 0)
        self._kernels.slices_launch(sizes, **self._bag_counts, num_owners=len(owners), **self._pooling)(
            grad_ptr=grad, a_ptr=self._sides[0][0], b_ptr=self._sides[1][0], tables_ptr=self._tables, pairs_ptr=self._pairs,
            slices_ptr=self._slices, order_ptr=self._order, targets_ptr=targets, offsets_ptr=self._offsets,
            weights_ptr=self.first if self._weights is None else self._weights,
            left_ptr=left, right_ptr=right, owners_ptr=owners,
        )  # fmt: skip
        sums = Sums(left, right, owners[:num_left], owners[right_start:])
        for launch in self._updates.parts_launches(sizes):
            launch(**sums.operands, slices_ptr=self._slices, order_ptr=self._order)
        return sums

    def finish(self, sums: Sums, cores: Ending, diagonals: Ending | None) -> None:
        """Write the gradients of cores and diagonals or update them; `diagonals` is None if there are none."""
        half = len(self.ranks)
        counts = [core.shape[1] for core in self._sides[1]]
        zeros = [0] * half
        columns = zip(
            self.ranks, self._diagonal_starts(), *map(_starts, self._sides),
            _starts(cores.results[:half]), _starts(cores.results[half:]),
            zeros if diagonals is None else _starts(diagonals.results), first_keys(counts)[:-1], counts, strict=True,
        )  # fmt: skip
        num_products = self.sizes.counts[1] if diagonals else 0
        operands = {
            "tables_ptr": on_device(list(columns), self.first.device),
            "d_ptr": self._diagonals[0] if self._diagonals else self.first,
            "products_ptr": torch.empty(num_products, self.sizes.rank, dtype=torch.float32, device=self.first.device),
            "seed_ptr": self._seed(cores, diagonals),
        }
        sizes = replace(self.sizes, aligned=self.sizes.aligned and all(_address(result) % 16 == 0 for result in cores.results))
        self._updates.finish_launch(sizes, cores.kind, cores.numbers, lr_in_tensor=cores.lr is not None)(
            **operands, **sums.operands, pairs_ptr=self._pairs, a_ptr=self._sides[0][0], b_ptr=self._sides[1][0],
            left_result_ptr=cores.results[0], right_result_ptr=cores.results[half],
            lr_ptr=sums.left if cores.lr is None else cores.lr,
        )  # fmt: skip
        if diagonals is not None:
            settings = {"lr_in_tensor": diagonals.lr is not None}
            self._updates.diagonals_launch(self.sizes, half, diagonals.kind, diagonals.numbers, **settings)(
                **operands, result_ptr=diagonals.results[0],
                lr_ptr=sums.left if diagonals.lr is None else diagonals.lr,
            )  # fmt: skip

    def _seed(self, *endings: Ending | None) -> Tensor:
        """Draw the seed for rounding updates on the device, [1] int64; return any tensor where nothing is updated or rounded."""
        if self.first.dtype == torch.float32 or all(ending is None or ending.kind == "gradient" for ending in endings):
            return self._order
        return torch.randint(1 << 60, (1,), device=self.first.device)

    def gradients_of_weights(self, grad: Tensor, targets: Tensor) -> Tensor:
        """Return the gradients of the weights, [L]: of each id its row times its bag's gradient; 0 for ids in no bag."""
        numbers = torch.arange(self.num_ids + 1, device=grad.device)
        rows = grad.new_empty(self.num_ids, self.sizes.num_cols, dtype=torch.float32)
        self._pool(rows, torch.empty_like(targets), numbers, None, "sum", 1)
        is_pooled = numbers[:-1] < self._offsets[-1]
        of_bags = grad.reshape(-1, self.sizes.num_cols).index_select(0, torch.where(is_pooled, targets, 0))
        return torch.where(is_pooled, rows.mul_(of_bags).sum(1), 0.0).to(grad.dtype)


def _starts(tensors: Sequence[Tensor]) -> list[int]:
    """Return where each tensor starts, in elements from the start of the first; 0 for empty tensors, which have no address."""
    first = _address(tensors[0])
    return [(_address(tensor) - first) // tensor.element_size() if tensor.numel() else 0 for tensor in tensors]


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr()
