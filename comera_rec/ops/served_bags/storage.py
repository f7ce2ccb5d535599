"""Storage of served tables: one block of bytes, which can be mapped from a file, and numbers that describe its layout.

Rows are stored one after the other. A row of int8 begins with its scale, a float32, and is padded to a multiple of 4 bytes, so a
lookup reads it from one or two cache lines.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from comera_rec.ops.served_bags.served_table import ServedTable, Slab

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
MOST_CORES = 4
_CODES = list(DTYPES.values())
_FEATURE = 6 + 5 * MOST_CORES  # M, mean, type, h, offset of formed rows, d; per core m, left rank, right rank, n, offset
_SLAB = 6  # feature, type, h, w, offset of rows, offset of columns
_ALIGNMENT = 64  # bytes; also the padding after the last row, because whole vectors are read


class Packed(NamedTuple):
    """T tables in the form that `served_bags` takes."""

    storage: Tensor
    """[bytes] uint8."""
    layout: Tensor
    """[T, 26] int64: rows, mean, type, formed rows and their offset, order; per core slices, ranks, columns, offset."""
    slabs: Tensor
    """[S, 6] int64: table, type, rows, width, offset of the rows, of the columns."""


def quantize(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Convert rows [n, w] to a type; for int8 also return the scale of each row [n], where row = scale * number in -127..127."""
    if dtype != torch.int8:
        return rows.to(dtype), None
    scales = (rows.abs().amax(1) if rows.shape[1] else rows.new_zeros(len(rows))).clamp_min(torch.finfo(torch.float32).tiny) / 127
    return (rows / scales[:, None]).round().to(torch.int8), scales


def pack(tables: Sequence[ServedTable], dtype: torch.dtype) -> Packed:
    """Pack tables as numbers of a type; with int8, narrow slabs are bfloat16. Columns of slabs are always float32.

    Tensors shared by tables are stored once.
    """
    parts: list[Tensor] = []
    offsets: dict[tuple[int, torch.dtype], int] = {}
    end = 0

    def put(rows: Tensor, dtype: torch.dtype) -> int:
        nonlocal end
        key = (id(rows), dtype)
        if key not in offsets:
            stored = _to_bytes(rows.flatten(1), dtype)
            offsets[key] = end
            parts.append(F.pad(stored, (0, -len(stored) % _ALIGNMENT)))
            end += len(parts[-1])
        return offsets[key]

    layout, slabs = [], []
    for t, table in enumerate(tables):
        formed = put(table.formed, dtype)
        record = [table.rows, int(table.mean), _CODES.index(dtype), len(table.formed), formed, len(table.cores)]
        for core in table.cores:
            record += [*core.shape, put(core, dtype)]
        layout.append(record + [0] * (_FEATURE - len(record)))
        for slab in table.slabs:
            narrow = least_type(slab.rows.shape[1], dtype)
            offset = put(slab.rows, narrow), put(slab.columns, torch.float32)
            slabs.append([t, _CODES.index(narrow), *slab.rows.shape, *offset])
    return Packed(
        F.pad(torch.cat(parts), (0, _ALIGNMENT)), torch.tensor(layout), torch.tensor(slabs, dtype=torch.long).view(-1, _SLAB)
    )


def unpack(storage: Tensor, layout: Tensor, slabs: Tensor, columns: int) -> list[ServedTable]:
    """Return the packed tables in float32."""
    tables = []
    for t, (rows, mean, code, formed, offset, order, *cores) in enumerate(layout.tolist()):
        dtype = _CODES[code]
        shapes = [cores[5 * k : 5 * k + 5] for k in range(order)]
        tables.append(
            ServedTable(
                rows=rows,
                columns=columns,
                mean=bool(mean),
                formed=_from_bytes(storage[offset:], formed, columns, dtype),
                cores=tuple(
                    _from_bytes(storage[at:], m, left * right * n, dtype).view(m, left, right, n)
                    for m, left, right, n, at in shapes
                ),
                slabs=tuple(
                    Slab(
                        rows=_from_bytes(storage[at:], count, width, _CODES[slab_code]),
                        columns=_from_bytes(storage[at_columns:], width, columns, torch.float32),
                    )
                    for slab_table, slab_code, count, width, at, at_columns in slabs.tolist()
                    if slab_table == t
                ),
            )
        )
    return tables


def row_bytes(size: int, dtype: torch.dtype) -> int:
    """Return the bytes of a row of `size` numbers."""
    return (4 + size + 3) // 4 * 4 if dtype == torch.int8 else size * dtype.itemsize


def least_type(size: int, dtype: torch.dtype) -> torch.dtype:
    """Return the type to store rows of `size` numbers in: with its scale, a narrow row of int8 is longer than one of bfloat16."""
    return min(dtype, torch.bfloat16, key=lambda each: row_bytes(size, each)) if dtype == torch.int8 else dtype


def _to_bytes(rows: Tensor, dtype: torch.dtype) -> Tensor:
    numbers, scales = quantize(rows.contiguous(), dtype)
    if scales is None:
        return numbers.view(torch.uint8).flatten()
    filled = F.pad(numbers.view(torch.uint8), (0, row_bytes(rows.shape[1], dtype) - 4 - rows.shape[1]))
    return torch.cat([scales[:, None].contiguous().view(torch.uint8), filled], dim=1).flatten()


def _from_bytes(storage: Tensor, count: int, size: int, dtype: torch.dtype) -> Tensor:
    if not size:
        return torch.empty(count, 0)
    rows = storage[: count * row_bytes(size, dtype)].view(count, row_bytes(size, dtype))
    if dtype != torch.int8:
        return rows.view(dtype).float()
    scales = rows[:, :4].contiguous().view(torch.float32)
    return scales * rows[:, 4 : 4 + size].contiguous().view(torch.int8).float()
