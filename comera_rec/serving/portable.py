"""Lookups in torch's operators alone: what is exported so runs wherever torch does.

F features of B bags each, V values, N columns. Every value is looked up in every group of tables, and the rows that are not its own
are masked out, because an exported program can't cut values by feature.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera_rec.ops.served_bags import ServedTable, quantize


class PortableTables(nn.Module):
    """What leads each row [B, N], then its bags: values [V] int64, feature by feature, and lengths [F * B] int64 -> [B, 1 + F, N].

    An id that its table lacks makes the bag NaN; so do lengths that don't belong to the values, all of them.
    """

    limits: Tensor
    means: Tensor

    def __init__(self, tables: Sequence[ServedTable], dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("limits", torch.tensor([table.rows for table in tables]))
        self.register_buffer("means", torch.tensor([table.mean for table in tables]))
        self.any_mean = any(table.mean for table in tables)
        sources: list[nn.Module] = []
        if any(len(table.formed) for table in tables):
            sources.append(_Formed(tables, dtype))
        orders: dict[tuple[int, ...], list[int]] = {}
        for t, table in enumerate(tables):
            if table.cores:
                orders.setdefault(table.col_modes, []).append(t)
        sources += [_Cores(tables, members, dtype) for members in orders.values()]
        if any(table.slabs for table in tables):
            sources.append(_Hot(tables, dtype))
        self.sources = nn.ModuleList(sources)

    def forward(self, lead: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
        features = len(self.limits)
        lengths_FB = lengths.view(features, -1)
        batch = lengths_FB.shape[1]
        ends = lengths.clamp(min=0).cumsum(0)
        bags = torch.searchsorted(ends, torch.arange(values.shape[0]), right=True)  # F * B beyond the last
        feature = (bags // batch).clamp(max=features - 1)
        is_there = (values >= 0) & (values < self.limits[feature])
        ids = torch.where(is_there, values, 0)
        rows = self.sources[0](ids, feature)
        for source in self.sources[1:]:
            rows = rows + source(ids, feature)
        rows = torch.where(is_there[:, None], rows, torch.nan)
        # Torch takes the last bag to go on to the last value, whatever its offset says; so one more bag takes what is in none.
        offsets = torch.cat([F.pad(ends, (1, 0)), ends.new_full((1,), values.shape[0])]).clamp(max=values.shape[0])
        pooled = F.embedding_bag(torch.arange(values.shape[0]), rows, offsets, mode="sum", include_last_offset=True)
        pooled_FBN = pooled[:-1].view(features, batch, -1)
        if self.any_mean:
            count = torch.where(self.means[:, None], lengths_FB, 1).clamp(min=1)
            pooled_FBN = pooled_FBN / count[:, :, None]
        fits = (lengths >= 0).all() & (ends[-1] <= values.shape[0])
        bags_BFN = torch.where(fits, pooled_FBN, torch.nan).transpose(0, 1)
        return torch.cat([lead.unsqueeze(1), bags_BFN], dim=1)


class _Rows(nn.Module):
    """Rows [n, w] as they are stored, read by number as float32."""

    numbers: Tensor
    scales: Tensor | None

    def __init__(self, rows: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        numbers, scales = quantize(rows, dtype)
        self.register_buffer("numbers", numbers)
        self.register_buffer("scales", scales)

    def forward(self, index: Tensor) -> Tensor:
        """[L] -> [L, w] float32."""
        rows = self.numbers.index_select(0, index).float()
        return rows if self.scales is None else rows * self.scales.index_select(0, index).unsqueeze(1)


class _Formed(nn.Module):
    """Rows that are formed in advance."""

    counts: Tensor
    firsts: Tensor

    def __init__(self, tables: Sequence[ServedTable], dtype: torch.dtype) -> None:
        super().__init__()
        counts = [len(table.formed) for table in tables]
        self.register_buffer("counts", torch.tensor(counts))
        self.register_buffer("firsts", torch.tensor([0, *counts[:-1]]).cumsum(0))
        self.rows = _Rows(torch.cat([table.formed for table in tables]), dtype)

    def forward(self, ids: Tensor, feature: Tensor) -> Tensor:
        is_mine = ids < self.counts[feature]
        rows: Tensor = self.rows(torch.where(is_mine, self.firsts[feature] + ids, 0))
        return torch.where(is_mine[:, None], rows, 0.0)


class _Cores(nn.Module):
    """Tables of the same column modes; ranks that one lacks are zeros."""

    is_member: Tensor
    counts: Tensor
    modes: Tensor
    firsts: Tensor

    def __init__(self, tables: Sequence[ServedTable], members: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__()
        order, self.columns = len(tables[members[0]].cores), tables[members[0]].columns
        self.register_buffer("is_member", torch.tensor([t in members for t in range(len(tables))]))
        self.register_buffer("counts", torch.tensor([len(table.formed) for table in tables]))
        modes, firsts = torch.ones(order, len(tables), dtype=torch.long), torch.zeros(order, len(tables), dtype=torch.long)
        self.sizes: list[tuple[int, int, int]] = []
        cores = []
        for k in range(order):
            mine = [tables[t].cores[k] for t in members]
            left, right = (max(core.shape[axis] for core in mine) for axis in (1, 2))
            modes[k, members] = torch.tensor([len(core) for core in mine])
            firsts[k, members] = torch.tensor([0, *(len(core) for core in mine[:-1])]).cumsum(0)
            padded = [F.pad(core, (0, 0, 0, right - core.shape[2], 0, left - core.shape[1])) for core in mine]
            self.sizes.append((left, right, padded[0].shape[3]))
            cores.append(_Rows(torch.cat(padded).flatten(1), dtype))
        self.register_buffer("modes", modes)
        self.register_buffer("firsts", firsts)
        self.cores = nn.ModuleList(cores)

    def forward(self, ids: Tensor, feature: Tensor) -> Tensor:
        is_mine = self.is_member[feature] & (ids >= self.counts[feature])
        digits, rest = [], torch.where(is_mine, ids, 0)
        for k in reversed(range(len(self.cores))):
            mode = self.modes[k][feature]
            digits.append(rest % mode + self.firsts[k][feature])
            rest = rest // mode
        rows = self.cores[0](digits[-1]).view(-1, *self.sizes[0][1:]).mT
        for core, (left, right, columns), digit in zip(self.cores[1:], self.sizes[1:], digits[-2::-1], strict=True):
            products = torch.bmm(rows, core(digit).view(-1, left, right * columns))
            rows = products.unflatten(2, (right, columns)).transpose(2, 3).flatten(1, 2)
        rows = rows.flatten(1)[:, : self.columns]
        return torch.where(is_mine[:, None], rows, 0.0)


class _Hot(nn.Module):
    """Hot slabs; widths that one lacks are zeros."""

    def __init__(self, tables: Sequence[ServedTable], dtype: torch.dtype) -> None:
        super().__init__()
        slabs = [(t, slab) for t, table in enumerate(tables) for slab in table.slabs]
        width = max(slab.columns.shape[0] for _, slab in slabs)
        rows = [F.pad(slab.rows, (0, width - slab.rows.shape[1])) for _, slab in slabs]
        columns = [F.pad(slab.columns, (0, 0, 0, width - slab.columns.shape[0])) for _, slab in slabs]
        per_table = [sum(len(slab.rows) for slab in table.slabs) for table in tables]
        self.register_buffer("counts", torch.tensor(per_table))
        self.register_buffer("formed", torch.tensor([len(table.formed) for table in tables]))
        self.register_buffer("firsts", torch.tensor([0, *per_table[:-1]]).cumsum(0))
        self.register_buffer("ends", torch.tensor([len(slab) for slab in rows]).cumsum(0))
        self.rows, self.columns = _Rows(torch.cat(rows), dtype), _Rows(torch.stack(columns).flatten(1), torch.float32)
        self.width = width

    counts: Tensor
    formed: Tensor
    firsts: Tensor
    ends: Tensor

    def forward(self, ids: Tensor, feature: Tensor) -> Tensor:
        is_mine = (ids < self.counts[feature]) & (ids >= self.formed[feature])
        number = torch.where(is_mine, self.firsts[feature] + ids, 0)
        slab = torch.searchsorted(self.ends, number, right=True)
        columns = self.columns(slab).view(ids.shape[0], self.width, -1)
        added = torch.bmm(self.rows(number).unsqueeze(1), columns).squeeze(1)
        return torch.where(is_mine[:, None], added, 0.0)
