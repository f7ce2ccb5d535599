"""What a training step of TT tables launches on a GPU, on a machine without one.

The step runs on fake tensors, which have sizes but no values, so anything that would wait for the device, or allocate by values on
it, raises an error. Our Triton launches are recorded, and torch's operators counted.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import comera_rec.ops.bags.triton_updates  # define the kernels before TRITON_INTERPRET is set, so that they can be compiled later
import comera_rec.ops.plan.triton  # noqa: F401
from comera_rec.nn import TTEmbeddingBag
from comera_rec.nn.tt_table import plan_tables
from comera_rec.ops import tt_bags
from comera_rec.ops.bags import TableGroup, kernel_calls, updates
from comera_rec.ops.bags import gpu as bags
from comera_rec.ops.bags.updates import register_update
from comera_rec.ops.launch import Launch, recorded_launches
from comera_rec.ops.plan import pairs
from comera_rec.tt import Blocks, TTShape

NONE = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh", "detach", "detach_",
    "alias", "device", "_record_function_enter_new", "_record_function_exit",
}  # fmt: skip
"""Operators that launch nothing."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step's operators of torch, each with the kernels that it launches, and our launches."""

    torch: list[tuple[str, int]] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)

    @property
    def kernels(self) -> int:
        """Kernels that the step launches."""
        return sum(kernels for _, kernels in self.torch) + len(self.launches)


class _Counter(TorchDispatchMode):
    """Counts operators, and replaces our registered operators by the Python code that launches their kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name in _INSIDE:
            with self:
                return _INSIDE[name](*args)
        result = func(*args, **(kwargs or {}))
        is_view = any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns)
        if name not in NONE and not is_view:
            # A radix sort has a pass per byte of the keys; besides histograms, their sums, values to move, and a copy.
            self.operators.append((name, 4 + args[0].element_size() if name == "sort" else 1))
        return result


_INSIDE: dict[str, Callable[..., Any]] = {
    "plan_pairs": pairs.split_and_sort,
    "plan_hot_rows": pairs.split_and_sort_hot_rows,
    "pool_pairs": bags.pool_into_bags,
    "pool_pairs_backward": bags.gradients,
}


def count_step(
    shapes: Sequence[TTShape],
    batch: int,
    *,
    optimizer: str = "Adagrad",
    hot_rows: Blocks = (),
    weighted: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Step:
    """Count a step of tables that share a lookup: plan, bags and updates, after a first one that creates optimizer state.

    Args:
        shapes: shapes of the tables, which differ only in row modes and ranks.
        batch: bags of each table, of one id.
        optimizer: "Adagrad" or "SGD", which update slices in backward; or "Adam", fused, over whole cores after it.
        hot_rows: blocks of hot rows of each table.
        weighted: whether ids have weights, which get gradients.
        dtype: type of the parameters.

    Raises:
        torch._subclasses.fake_tensor.DataDependentOutputException: where the step would wait for the device.
    """
    counter = _Counter()
    dim, ids_of_all = math.prod(shapes[0].col_shape), len(shapes) * batch
    with _triton_on_fake_tensors(), recorded_launches() as launches:
        tables = [
            TTEmbeddingBag(math.prod(shape.row_shape), dim, shape=shape, hot_rows=hot_rows, impl="triton", dtype=dtype)
            for shape in shapes
        ]
        parameters = [parameter for table in tables for parameter in table.parameters()]
        settings = {"lr": torch.tensor(0.01), "fused": True} if optimizer == "Adam" else {"lr": 0.01}
        step = getattr(torch.optim, optimizer)(parameters, **settings)
        assert optimizer == "Adam" or all(register_update(parameter, step) for parameter in parameters)
        ids = torch.empty(ids_of_all, dtype=torch.int64).chunk(len(tables))
        offsets, upstream = torch.empty(ids_of_all + 1, dtype=torch.int64), torch.empty(batch, len(tables) * dim)
        weights = torch.empty(ids_of_all, requires_grad=True) if weighted else None
        group = TableGroup([table.forward_parameters() for table in tables])

        def train() -> None:
            plan = plan_tables([[each] for each in ids], tables, [["ids"]] * len(tables), impl="triton")
            out = tt_bags(group, plan, offsets, num_cols=dim, features=len(tables), impl="triton", per_sample_weights=weights)
            out.backward(upstream.to(out.dtype))
            step.step()
            step.zero_grad()

        train()
        launches.clear()
        with counter:
            train()
        return Step(torch=counter.operators, launches=list(launches))


def _constants(rows: list[Any], device: torch.device) -> Tensor:
    return torch.empty(len(rows), len(rows[0]), dtype=torch.int64)


@contextmanager
def _triton_on_fake_tensors() -> Iterator[None]:
    """Make the CPU appear to be a device on which Triton runs, as it can in its interpreter."""
    with (
        mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}),
        mock.patch.object(kernel_calls, "_address", return_value=0),  # fake tensors have no address
        mock.patch.object(kernel_calls, "on_device", _constants),  # cached on a GPU, as the next two are
        mock.patch.object(pairs, "on_device", _constants),
        mock.patch.object(bags, "plan_all_rows", lru_cache(pairs.plan_all_rows)),
        mock.patch.multiple(updates, _count=lambda _: None, _memory_of=lambda _: []),  # the host counts steps
        FakeTensorMode(),
    ):
        yield
