"""Random tables, their bags by definition, and tensors with unusual layouts, for tests of operators."""

import copy
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera_rec import TTEmbeddingBag
from comera_rec.ops import LookupPlan, plan_lookup, tt_bags
from comera_rec.tt import Blocks, TTShape

Tables = Sequence[TTEmbeddingBag]
every_impl = pytest.mark.parametrize("impl", ["auto", "reference"])
every_order = pytest.mark.parametrize("order", [2, 3, 4])

# Relative to the largest value: float32's for sums of thousands of products; for others half the last digit, and the sums'.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 6e-4}


def tables_of(
    shapes: Sequence[TTShape], *, hot_rows: Sequence[Blocks] = (), num_cols: int | None = None, dtype: torch.dtype = torch.float32
) -> nn.ModuleList:
    """Build tables with random rank parameters and hot rows; `hot_rows` of the first few."""
    tables = nn.ModuleList()
    for shape, hot in zip_longest(shapes, hot_rows, fillvalue=()):
        table = TTEmbeddingBag(shape.num_rows, num_cols or shape.num_cols, shape=shape, dtype=dtype, hot_rows=hot)
        for block in table.hot_blocks():
            nn.init.normal_(block.core_0)  # it starts at zero
        for parameter in (rank for module in (table, *table.hot_blocks()) for rank in module.rank_parameters()):
            nn.init.uniform_(parameter, 0.5, 1.5)
        tables.append(table)
    return tables


def make_tables(
    row_shapes: Sequence[Sequence[int]],
    col_shape: Sequence[int],
    ranks: Sequence[int] | Sequence[Sequence[int]],
    num_cols: int | None = None,
    dtype: torch.dtype = torch.float32,
    hot_rows: Sequence[Blocks] = (),
) -> nn.ModuleList:
    """Build tables that differ in row modes and hot rows, and in ranks if these are given for each."""
    each = [ranks] * len(row_shapes) if not ranks or isinstance(ranks[0], int) else ranks
    shapes = [TTShape(rows, col_shape, of_table) for rows, of_table in zip(row_shapes, each, strict=True)]  # type: ignore[arg-type]
    return tables_of(shapes, hot_rows=hot_rows, num_cols=num_cols, dtype=dtype)


def plan_of(tables: Tables, ids: list[Tensor], impl: str = "auto") -> LookupPlan:
    return plan_lookup(ids, [table.shape.row_shape for table in tables], impl=impl)


def pool(
    tables: Tables, ids: list[Tensor], offsets: Tensor, *, impl: str = "auto", plan: LookupPlan | None = None, **arguments: Any
) -> Tensor:
    plan = plan or plan_of(tables, ids, impl)
    arguments.setdefault("num_cols", tables[0].embedding_dim)
    return tt_bags([table.forward_parameters() for table in tables], plan, offsets, impl=impl, **arguments)


def pool_by_definition(tables: Tables, ids: list[Tensor], offsets: Tensor, **arguments: Any) -> Tensor:
    """Pool bags of tables that are too large to be dense; `test_any_bags` compares it with dense ones."""
    return pool(tables, ids, offsets, **{**arguments, "impl": "reference"})


def pool_dense(
    tables: Tables, ids: list[Tensor], offsets: Tensor, *, features: int = 1, mode: str = "sum", **arguments: Any
) -> Tensor:
    rows = torch.cat([table.dense_matrix()[table_ids.long()] for table, table_ids in zip(tables, ids, strict=True)])
    # Torch's last bag extends to the last id, so an additional bag takes the ids that are in none.
    pooled = F.embedding_bag(torch.arange(len(rows)), rows, offsets.long(), mode=mode, **arguments)[:-1]
    return pooled.unflatten(0, (features, -1)).transpose(0, 1).flatten(1)


def differentiate(
    function: Any, tables: Tables, *batch: object, grad: Tensor | None = None, dtype: torch.dtype | None = None, **arguments: Any
) -> list[Tensor]:
    """Output and gradients of all parameters, and of weights if given; computed in `dtype` from numbers of the tables' type."""
    core = tables[0].core_0
    tables = [copy.deepcopy(table).to(dtype) if dtype else table for table in tables]
    inputs: list[Tensor] = [parameter for table in tables for parameter in table.parameters()]
    if arguments.get("per_sample_weights") is not None:
        weights = arguments["per_sample_weights"].to(core).to(dtype or core.dtype).detach().requires_grad_()
        arguments["per_sample_weights"] = weights
        inputs.append(weights)
    out = function(tables, *batch, **arguments)
    grad = torch.linspace(-1, 2, out.numel()).view_as(out) if grad is None else grad
    return [out.detach(), *torch.autograd.grad(out, inputs, grad.to(core).to(out.dtype))]


def assert_near(actual: Sequence, expected: Sequence, dtype: torch.dtype = torch.float32, tolerance: float | None = None) -> None:
    """Compare relative to each tensor's largest value; for diagonals, whose long sums may cancel, to the largest of them all."""
    largest = [exact.abs().max().item() if exact.numel() else 0.0 for exact in expected]
    largest_of_diagonals = max((value for value, exact in zip(largest, expected, strict=True) if exact.dim() < 3), default=0.0)
    for k, (tensor, exact) in enumerate(zip(actual, expected, strict=True)):
        assert tensor.dtype == dtype
        atol = (tolerance or TOLERANCE[dtype]) * (largest_of_diagonals if exact.dim() < 3 else largest[k])
        torch.testing.assert_close(tensor.double().cpu(), exact, rtol=0, atol=atol, msg=lambda text, k=k: f"tensor {k}: {text}")


def check(tables: Tables, *batch: object, impl: str = "auto", is_large: bool = False, **arguments: Any) -> None:
    """Compare outputs and gradients with those of dense tables in float64, or of the definition if tables are too large."""
    actual = differentiate(pool, tables, *batch, impl=impl, **arguments)
    expected = differentiate(pool_by_definition if is_large else pool_dense, tables, *batch, dtype=torch.float64, **arguments)
    assert_near(actual, expected, tables[0].core_0.dtype)


def plain(tensor: Tensor) -> Tensor:
    return tensor


def within(tensor: Tensor) -> Tensor:
    """Copy to the middle of a longer buffer, one element past a vector-aligned address."""
    return torch.empty(tensor.numel() + 3, dtype=tensor.dtype)[1:-2].view(tensor.shape).copy_(tensor)


def strided(tensor: Tensor) -> Tensor:
    """Copy to every other element of a buffer, along the last dimension."""
    return torch.empty(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)[..., ::2].copy_(tensor)


def transposed(tensor: Tensor) -> Tensor:
    """Copy with the first dimension innermost."""
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


LAYOUTS = [plain, within, strided, transposed]


def pool_arguments(num_cols: int = 6) -> dict[str, Any]:
    """The operators' arguments for two small tables of three cores, the second with a hot block, and five ids in two bags."""
    tables = make_tables([(3, 2, 4), (2, 2, 2)], (2, 1, 3), [(2, 3), (4, 1)], num_cols, hot_rows=[(), ((4, 2),)])
    modules = [*tables, *tables[1].hot_blocks()]
    return {
        "cores": [core.detach() for module in modules for core in module.cores()],
        "diagonals": [rank.detach() for module in modules for rank in module.rank_parameters()],
        "plan": list(plan_of(tables, [torch.tensor([1, 5, 23]), torch.tensor([7, 0])])),
        "offsets": torch.tensor([0, 2, 5]),
        "weights": None,
        "mean": False,
        "slots": [0, 1],
        "num_slots": 2,
        "num_cols": num_cols,
        "hot_blocks": [0, 1],
        "first_rows": [0, 0],
    }
