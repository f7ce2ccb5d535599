"""Formats that Arrow reads are parsed in blocks, which together contain the whole log and never exceed their size."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from data_pipeline.counts import GroupCounter
from data_pipeline.parse import Parsed
from data_pipeline.schema import Column, LogSchema
from data_pipeline.tables import json_types, parse_table, parse_text, table_blocks, text_blocks

SCHEMA = LogSchema(
    columns=(
        Column(name="price", kind="float"),
        Column(name="count", kind="int64"),
        Column(name="shop", kind="category"),
        Column(name="tags", kind="list"),
    ),
    separator=",",
    format="csv",
)
NAMES = tuple(column.name for column in SCHEMA.columns)
_DRAW = np.random.default_rng(0)
ROWS = [
    (float(price), int(count), f"shop {count % 7}", [f"t{tag}" for tag in range(count % 5)])
    for price, count in zip(1e6 + _DRAW.normal(size=300), _DRAW.integers(1 << 40, size=300), strict=True)
]
LONG = {7: "x" * 900, 8: "", 200: "y" * 500}  # shops of some rows, far longer than others
TABLE = pa.table(
    {
        "price": [row[0] for row in ROWS],
        "count": [row[1] if number % 11 else None for number, row in enumerate(ROWS)],
        "shop": pa.array([LONG.get(number, row[2]) for number, row in enumerate(ROWS)]),
        "tags": [row[3] for row in ROWS],
    }
)
# The same rows; one in 10 lines of text is malformed.
LINES = [
    ["oops", "1", "a", ""] if number % 10 == 5 else [price, count, f'"{shop}"', "|".join(tags or [])]
    for number, (price, count, shop, tags) in enumerate(zip(*TABLE.to_pydict().values(), strict=True))
]
CSV = "".join(",".join("" if cell is None else str(cell) for cell in line) + "\n" for line in LINES).encode()
JSON = b"".join(
    json.dumps(dict(zip(NAMES, row, strict=True))).encode() + b"\n" for row in zip(*TABLE.to_pydict().values(), strict=True)
)


def json_blocks(block_bytes: int) -> Iterator[Parsed]:
    return text_blocks(JSON, replace(SCHEMA, format="jsonl"), json_types(JSON, SCHEMA), block_bytes=block_bytes)


FORMATS: dict[str, tuple[Callable[[int], Iterator[Parsed]], Parsed]] = {
    "csv": (
        lambda size: text_blocks(CSV, SCHEMA, NAMES, block_bytes=size),
        parse_text(CSV, SCHEMA, NAMES),
    ),
    "jsonl": (json_blocks, parse_text(JSON, replace(SCHEMA, format="jsonl"), json_types(JSON, SCHEMA))),
    "parquet": (lambda size: table_blocks(TABLE, SCHEMA, block_bytes=size), parse_table(TABLE, SCHEMA)),
    "dictionaries": (
        lambda size: table_blocks(TABLE.set_column(2, "shop", TABLE["shop"].dictionary_encode()), SCHEMA, block_bytes=size),
        parse_table(TABLE, SCHEMA),
    ),
}


def nbytes(parsed: Parsed) -> int:
    return sum(value.nbytes for value in vars(parsed).values() if isinstance(value, np.ndarray))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("block_bytes", [2000, 30_000])
def test_blocks_together_contain_the_whole(form: str, block_bytes: int) -> None:
    make, whole = FORMATS[form]
    blocks = list(make(block_bytes))
    assert len(blocks) > 1
    assert sum(block.lines for block in blocks) == whole.lines
    for block in blocks:
        assert block.lines == 1 or nbytes(block) <= block_bytes
    for field in fields(Parsed):
        values = [getattr(block, field.name) for block in blocks]
        if field.name in ("labels", "integers", "integer_missing", "keys", "key_missing", "starts"):
            np.testing.assert_array_equal(np.concatenate(values, axis=-1), getattr(whole, field.name), err_msg=field.name)
    lists = [block.list_keys[0, : block.list_ends[0, -1]] for block in blocks if block.rows]
    np.testing.assert_array_equal(np.concatenate(lists), whole.list_keys[0, : whole.list_ends[0, -1]])
    lengths = [np.diff(block.list_ends, prepend=0) for block in blocks]
    np.testing.assert_array_equal(np.concatenate(lengths, axis=1), np.diff(whole.list_ends, prepend=0))
    assert tuple(reason for block in blocks for reason in block.reasons) == whole.reasons


def test_moments_of_several_blocks_are_those_of_one(tmp_path: Path) -> None:
    counter = GroupCounter(tmp_path / "run", SCHEMA, ())
    for block in table_blocks(TABLE, SCHEMA, block_bytes=2000):
        counter.add(block, slice(None))
    counted = counter.finish()
    assert (counted.rows, [column.missing for column in counted.integers]) == (300, [0, 28])
    prices, numbers = TABLE["price"].to_numpy(), TABLE["count"].drop_null().to_numpy().astype(np.float64)
    for column, values in zip(counted.integers, (prices, numbers), strict=True):
        assert (column.min, column.max) == (values.min(), values.max())
        moments = column.sum, column.deviations
        np.testing.assert_allclose(moments, (values.sum(), values.var() * len(values)), rtol=1e-9)
