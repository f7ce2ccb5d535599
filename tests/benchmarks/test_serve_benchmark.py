"""The rivals in `benchmarks.run serve` store the right rows, and requests have the documented form."""

from __future__ import annotations

import torch

from benchmarks.serve import CompiledLookup, ServeCase, build, draw_request, quantized_collection, served_tables
from comera_rec.ops.served_bags.reference import rows_of

CASE = ServeCase(rows=(3000, 40, 900), dim=16, compression=5, dense_arch=(8,), over_arch=(8,), batch=100)


def test_quantized_rows_are_the_tables() -> None:
    torch.manual_seed(0)
    tables = served_tables(build(CASE))
    _, values, lengths = draw_request(CASE)
    bags = CompiledLookup(quantized_collection(tables))(torch.zeros(100, 16), values, lengths)[:, 1:]
    rows = torch.stack([rows_of(table, ids) for table, ids in zip(tables, values.split(100), strict=True)], dim=1)
    steps = (rows.amax(2) - rows.amin(2)) / 255
    assert ((bags - rows).abs().amax(2) <= 0.51 * steps + 1e-3 * rows.abs().amax(2)).all()
