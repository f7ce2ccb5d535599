"""Lookups of exported models: with torch's operators alone, or by an operator whose shared library is exported beside the model.

F features of B bags each, V values, N columns. With torch's operators, every value is looked up in every group of tables, and rows
from groups without its table are masked out, because an exported program can't split values by feature.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera_rec.ops.served_bags import Packed, ServedTable, Slab, least_type, pack, quantize, served_bags

_Members = dict[int, tuple[range, tuple[Tensor, ...]]]
"""By table, the ids that cores have rows for, and the cores."""


class ServedTables(nn.Module):
    """One table for each of F features, all of one dimension."""

    def __init__(self, tables: Sequence[ServedTable]) -> None:
        super().__init__()
        self.features, self.columns = len(tables), tables[0].columns
        self.replaces_bad_ids = False
        self.limits = nn.Buffer(torch.tensor([table.rows for table in tables]))
        orders = {t: table.row_order for t, table in enumerate(tables) if table.row_order is not None}
        starts, start = torch.full((len(tables),), -1), 0
        for t, order in orders.items():
            starts[t], start = start, start + len(order)
        self.row_orders = nn.Buffer(torch.cat(list(orders.values()))) if orders else None
        self.order_starts = nn.Buffer(starts)

    @abstractmethod
    def forward(self, values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> Tensor:
        """Pool bags: values [V] int64 and lengths [F * B] int64, feature by feature, and weights [V] -> [B, F, N].

        An id out of range makes its bag NaN or raises an error, and so do lengths that don't fit the values.
        """

    @abstractmethod
    def rows(self, values: Tensor, lengths: Tensor) -> Tensor:
        """Return the row of each value, [V, N]."""

    def feature_of(self, values: Tensor, lengths: Tensor) -> Tensor:
        """Return the number of each value's feature, [V]."""
        ends = self._by_feature(lengths).clamp(0, values.shape[0]).sum(1).cumsum(0)
        return torch.searchsorted(ends, torch.arange(values.shape[0]), right=True).clamp(max=self.features - 1)

    def rows_of(self, values: Tensor, lengths: Tensor) -> Tensor:
        """Replace ids by rows where they differ, and ids out of range by 0 where the collection does so."""
        if self.row_orders is None and not self.replaces_bad_ids:
            return values
        feature = self.feature_of(values, lengths)
        is_valid = (values >= 0) & (values < self.limits[feature])
        if self.replaces_bad_ids:
            values, is_valid = torch.where(is_valid, values, 0), torch.ones_like(is_valid)
        if self.row_orders is None:
            return values
        start = self.order_starts[feature]
        has_row = (start >= 0) & is_valid
        return torch.where(has_row, self.row_orders[torch.where(has_row, start + values, 0)].long(), values)

    def _by_feature(self, lengths: Tensor) -> Tensor:
        return lengths.view(self.features, lengths.shape[0] // self.features)


class FastTables(ServedTables):
    """Lookups by a single operator, which raises an error for an id out of range."""

    def __init__(self, tables: Sequence[ServedTable], dtype: torch.dtype) -> None:
        super().__init__(tables)
        self.storage, self.layout, self.slabs = map(nn.Buffer, pack(tables, dtype))

    def forward(self, values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> Tensor:
        return self._bags(values, lengths, lengths, weights=weights)

    def rows(self, values: Tensor, lengths: Tensor) -> Tensor:
        counts = self._by_feature(lengths).sum(1)
        return self._bags(values, lengths, torch.ones_like(values), counts=counts)

    def _bags(self, values: Tensor, lengths: Tensor, lengths_of_bags: Tensor, **others: Tensor | None) -> Tensor:
        packed = Packed(self.storage, self.layout, self.slabs)
        return served_bags(packed, self.rows_of(values, lengths), lengths_of_bags, self.columns, **others)


class PortableTables(ServedTables):
    """Lookups in torch's operators; NaN for an id out of range."""

    def __init__(self, tables: Sequence[ServedTable], dtype: torch.dtype) -> None:
        super().__init__(tables)
        self.any_mean, self.means = any(table.mean for table in tables), nn.Buffer(torch.tensor([table.mean for table in tables]))
        groups: dict[tuple[int, ...], _Members] = {}
        for t, table in enumerate(tables):
            if formed := len(table.formed):
                groups.setdefault((), {})[t] = range(formed), (table.formed[:, None, None],)
            if table.cores:
                groups.setdefault(table.col_modes, {})[t] = range(formed, table.rows), table.cores
        sources: list[nn.Module] = [_Cores(tables, members, dtype) for members in groups.values()]
        sources += [_Hot(tables, members, dtype) for members in _by_width(tables)]
        self.sources = nn.ModuleList(sources)

    def forward(self, values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> Tensor:
        # Compiled code must take no rows, too: nothing here divides by their number, takes the last of their entries or pads them.
        count = values.shape[0]
        lengths_FB = self._by_feature(lengths)
        counts_FB = lengths_FB.clamp(0, count)
        # torch extends the last bag to the last value, whatever its offset; an additional bag takes the values that are in no bag.
        ends = counts_FB.flatten().cumsum(0)
        offsets = torch.cat([ends.new_zeros(1), ends, ends.new_full((1,), count)]).clamp(max=count)
        rows, index = self.rows(values, lengths), torch.arange(count)
        pooled = F.embedding_bag(index, rows, offsets, mode="sum", include_last_offset=True, per_sample_weights=weights)
        pooled_FBN = pooled[:-1].view(*lengths_FB.shape, self.columns)
        if self.any_mean:
            pooled_FBN = pooled_FBN / torch.where(self.means[:, None], counts_FB, 1).clamp(min=1)[:, :, None]
        fits = (lengths_FB == counts_FB).all() & (counts_FB.sum() <= count)
        return torch.where(fits, pooled_FBN, torch.nan).transpose(0, 1)

    def rows(self, values: Tensor, lengths: Tensor) -> Tensor:
        values, feature = self.rows_of(values, lengths), self.feature_of(values, lengths)
        is_valid = (values >= 0) & (values < self.limits[feature])
        ids = torch.where(is_valid, values, 0)
        rows: Tensor = self.sources[0](ids, feature)
        for source in self.sources[1:]:
            rows = rows + source(ids, feature)
        return torch.where(is_valid[:, None], rows, torch.nan)


class _Rows(nn.Module):
    """Rows [n, w] in their stored type, read by number as float32."""

    def __init__(self, rows: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        numbers, scales = quantize(rows, dtype)
        self.numbers, self.scales = nn.Buffer(numbers), None if scales is None else nn.Buffer(scales)

    def forward(self, index: Tensor) -> Tensor:
        """[L] -> [L, w] float32."""
        rows = self.numbers.index_select(0, index).float()
        return rows if self.scales is None else rows * self.scales.index_select(0, index).unsqueeze(1)


class _Cores(nn.Module):
    """Tables of the same column modes; smaller ranks are padded with zeros. Rows formed in advance are a single core."""

    def __init__(self, tables: Sequence[ServedTable], members: _Members, dtype: torch.dtype) -> None:
        super().__init__()
        cores_of = [cores for _, cores in members.values()]
        order, self.columns = len(cores_of[0]), tables[0].columns
        begins, ends = torch.zeros(2, len(tables), dtype=torch.long)
        for t, (ids, _) in members.items():
            begins[t], ends[t] = ids.start, ids.stop
        self.begins, self.ends = nn.Buffer(begins) if begins.any() else None, nn.Buffer(ends)
        modes, firsts = torch.ones(order, len(tables), dtype=torch.long), torch.zeros(order, len(tables), dtype=torch.long)
        self.sizes: list[tuple[int, int, int]] = []
        cores = []
        for k in range(order):
            unpadded = [each[k] for each in cores_of]
            left, right = (max(1, *(core.shape[axis] for core in unpadded)) for axis in (1, 2))  # 1 if all were truncated to rank 0
            modes[k, list(members)] = torch.tensor([len(core) for core in unpadded])
            firsts[k, list(members)] = torch.tensor([0, *(len(core) for core in unpadded[:-1])]).cumsum(0)
            padded = [
                core if core.shape[1:3] == (left, right) else F.pad(core, (0, 0, 0, right - core.shape[2], 0, left - core.shape[1]))
                for core in unpadded
            ]  # padding by nothing copies
            self.sizes.append((left, right, padded[0].shape[3]))
            cores.append(_Rows(torch.cat(padded).flatten(1), dtype))
        self.modes = nn.Buffer(modes)
        self.firsts = nn.Buffer(firsts)
        self.cores = nn.ModuleList(cores)

    def forward(self, ids: Tensor, feature: Tensor) -> Tensor:
        in_source = ids < self.ends[feature]
        if self.begins is not None:
            in_source &= ids >= self.begins[feature]
        digits, rest = [], torch.where(in_source, ids, 0)
        for k in reversed(range(1, len(self.cores))):
            mode = self.modes[k][feature]
            digits.append(rest % mode + self.firsts[k][feature])
            rest = rest // mode
        digits.append(rest + self.firsts[0][feature])
        rows = self.cores[0](digits[-1]).view(-1, *self.sizes[0][1:]).mT
        for core, (left, right, columns), digit in zip(self.cores[1:], self.sizes[1:], digits[-2::-1], strict=True):
            products = torch.bmm(rows, core(digit).view(-1, left, right * columns))
            rows = products.unflatten(2, (right, columns)).transpose(2, 3).flatten(1, 2)
        rows = rows.flatten(1)[:, : self.columns]
        return torch.where(in_source[:, None], rows, 0.0)


class _Hot(nn.Module):
    """Slabs of similar widths, at most one for each table; narrower ones are padded with zeros."""

    def __init__(self, tables: Sequence[ServedTable], members: Mapping[int, tuple[int, Slab]], dtype: torch.dtype) -> None:
        super().__init__()
        slabs = [slab for _, slab in members.values()]
        width = max(slab.rows.shape[1] for slab in slabs)
        rows = [F.pad(slab.rows, (0, width - slab.rows.shape[1])) for slab in slabs]
        columns = [F.pad(slab.columns, (0, 0, 0, width - slab.columns.shape[0])) for slab in slabs]
        self.columns = nn.Buffer(torch.cat(columns))
        self.rows = _Rows(torch.cat(rows), least_type(width, dtype))
        firsts, beyond, offsets, numbers = torch.zeros(4, len(tables), dtype=torch.long)
        offset = 0
        for number, (t, (first, slab)) in enumerate(members.items()):
            firsts[t], beyond[t] = max(first, len(tables[t].formed)), first + len(slab.rows)
            offsets[t], numbers[t] = offset - first, number * width
            offset += len(slab.rows)
        self.firsts, self.beyond, self.offsets, self.numbers = map(nn.Buffer, (firsts, beyond, offsets, numbers))

    def forward(self, ids: Tensor, feature: Tensor) -> Tensor:
        in_source = (ids >= self.firsts[feature]) & (ids < self.beyond[feature])
        rows = self.rows(torch.where(in_source, self.offsets[feature] + ids, 0))
        index = self.numbers[feature][:, None] + torch.arange(rows.shape[1])
        # Weighted sums of columns as weighted bags, because a matrix product would copy the columns for each value.
        return F.embedding_bag(index, self.columns, mode="sum", per_sample_weights=torch.where(in_source[:, None], rows, 0.0))


def _by_width(tables: Sequence[ServedTable]) -> Iterator[dict[int, tuple[int, Slab]]]:
    """Yield groups of slabs whose widths round up to the same power of two: table -> (id of the first row, slab)."""
    groups: dict[tuple[int, int], dict[int, tuple[int, Slab]]] = {}
    for t, table in enumerate(tables):
        first = 0
        for slab in table.slabs:
            bits, turn = (slab.rows.shape[1] - 1).bit_length(), 0
            while t in groups.get((bits, turn), {}):
                turn += 1
            if slab.rows.shape[1] and first + len(slab.rows) > len(table.formed):
                groups.setdefault((bits, turn), {})[t] = first, slab
            first += len(slab.rows)
    yield from groups.values()
