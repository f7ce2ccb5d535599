"""Requests that can't be encoded are refused in one line; `test_data_sets` checks how others are encoded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from random_logs import make, random_rows

from data_pipeline.encoder import RequestEncoder
from data_pipeline.manifest import read_manifest
from data_pipeline.schema import Column, LogSchema, criteo_schema

SCHEMA = LogSchema(
    columns=(
        Column(name="cents", kind="integer"),
        Column(name="tags", kind="list", separator=" "),
        Column(name="code", kind="hex"),
        Column(name="shop", kind="category"),
    ),
    separator=",",
)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "log").write_text("".join(f"{i % 9 - 2},a b a,{i % 5:x},shop {i % 3}\n" for i in range(60)))
    make(tmp_path / "log", tmp_path / "data", schema=SCHEMA)
    return tmp_path / "data"


def test_no_rows(data: Path) -> None:
    dense, values, lengths = RequestEncoder(data)([])
    assert dense.shape == (0, len(read_manifest(data).integer_columns))
    assert len(values) == len(lengths) == 0


CRITEO: dict[str, Any] = {name: "1" if name[0] == "C" else 1 for name in criteo_schema(labeled=False).of_kind("integer", "hex")}
EVERY_KIND: dict[str, Any] = {"cents": 1, "tags": [], "code": "1", "shop": "a"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"I3": "3"}, "row 1: I3 is '3', which is not a 32-bit integer or null"),
        ({"I3": True}, "row 1: I3 is True, which is not a 32-bit integer"),
        ({"I3": 1 << 31}, "row 1: I3 is 2147483648, which is not a 32-bit integer"),
        ({"C4": 17}, "row 1: C4 is 17, which is not a string of 1 to 8 hex digits or null"),
        ({"C4": "0x1f"}, "row 1: C4 is '0x1f', which is not a string of 1 to 8 hex digits"),
        ({"C4": "\u0661"}, r"row 1: C4 is '\\u0661', which is not"),
        ({"C4": ["1"]}, r"row 1: C4 is \['1'\], which is not"),
    ],
)
def test_criteo_rows_refused(tmp_path: Path, write_log: Callable[..., Path], change: dict[str, Any], message: str) -> None:
    make(write_log(random_rows(30)), tmp_path / "data")
    encoder = RequestEncoder(tmp_path / "data")
    encoder([CRITEO, CRITEO | {"label": 1, "unknown": object()}])
    with pytest.raises(ValueError, match=message):
        encoder([CRITEO, CRITEO | change])
    without = {name: cell for name, cell in CRITEO.items() if name not in change}
    name = next(iter(change))
    with pytest.raises(ValueError, match=f"row 1 has no {name}; give null where its value is missing"):
        encoder([CRITEO, without])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shop": 5.0}, r"row 0: shop is 5\.0, which is not a string, an integer or null"),
        ({"shop": "\ud800"}, r"row 0: shop is '\\ud800', which is not a string"),
        ({"tags": "a b"}, "row 0: tags is 'a b', which is not a list of non-empty strings or integers, or null"),
        ({"tags": ["a", ""]}, r"row 0: tags is \['a', ''\], which is not a list"),
        ({"tags": ["a", 1.5]}, r"row 0: tags is \['a', 1\.5\], which is not a list"),
        ({"tags": [None]}, r"row 0: tags is \[None\], which is not a list"),
    ],
)
def test_text_and_lists_refused(data: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RequestEncoder(data)([EVERY_KIND | change])
    with pytest.raises(ValueError, match="row 0 is 5, which is not an object with a value for each column"):
        RequestEncoder(data)([5])  # type: ignore[list-item]
