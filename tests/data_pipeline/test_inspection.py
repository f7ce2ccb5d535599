"""`comera inspect` pairs ids and texts as the log and the data set's shards do."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import pytest
import random_logs
from click.testing import CliRunner
from random_logs import make, read
from test_formats import ROWS, as_csv

from comera_rec.cli.data import inspect
from data_pipeline.inspection import Entry, find_id, find_text, to_text
from data_pipeline.manifest import Manifest, read_manifest
from data_pipeline.schema import read_schema

SCHEMA = """
separator = ","
header = true
[columns]
bought = "label"
shop = "category"
code = "hex"
tags = { kind = "list", separator = " ", hash_buckets = 50 }
"""


@pytest.fixture
def orders(tmp_path: Path) -> tuple[Manifest, Path]:
    (tmp_path / "log.csv").write_bytes(as_csv(ROWS))
    (tmp_path / "schema.toml").write_text(SCHEMA)
    return make(tmp_path / "log.csv", tmp_path / "data", schema=read_schema(tmp_path / "schema.toml")), tmp_path / "data"


def test_hex_digits_both_ways(made_data: Path) -> None:
    manifest, train = read_manifest(made_data), read(made_data, "train")
    texts = pd.Series([int(row[16], 16) if row[16] else None for row in random_logs.ROWS[: len(train)]])
    assert train["C3"].max() > 3
    for number in range(1, train["C3"].max() + 1):
        entry = find_id(manifest, made_data, "C3", number)
        assert entry.text is not None
        assert texts[train["C3"] == number].eq(int(entry.text, 16)).all()
        assert entry.count == (train["C3"] == number).sum()
        assert find_text(manifest, made_data, "C3", entry.text) == entry
        assert find_text(manifest, made_data, "C3", entry.text.upper().lstrip("0") or "0").id == number


def test_texts_and_hashes(orders: tuple[Manifest, Path]) -> None:
    train = read(orders[1], "train")
    rows = pd.DataFrame(ROWS[: len(train)])
    for shop in ("north", 'the "inn", town', "größe"):
        entry = find_text(*orders, "shop", shop)
        assert train["shop"][rows["shop"] == shop].eq(entry.id).all()
        assert entry == Entry(column="shop", id=entry.id, text=shop, count=(rows["shop"] == shop).sum())
    for row, ids in zip(rows["tags"], train["tags"], strict=True):
        assert [find_text(*orders, "tags", tag).id for tag in row[:1]] == ids[:1].tolist()
    assert find_text(*orders, "shop", "nowhere") == Entry(column="shop", id=0, text="nowhere", count=None)
    assert find_text(*orders, "shop", "") == find_id(*orders, "shop", 0) == Entry(column="shop", id=0, text=None, count=None)


@pytest.mark.parametrize(
    ("column", "id_or_text", "message"),
    [
        ("shop", 1, "the vocabulary of shop stores hashes of texts, not texts; ask for the id of a text with `text`"),
        ("tags", 7, "ids of tags are hashes, each shared by many texts; ask for the id of a text with `text`"),
        ("code", 99, "`id` is 99; ids of code are 0 to 9"),
        ("code", -1, "`id` is -1; ids of code are 0 to 9"),
        ("code", "xyz", "`text` is 'xyz'; values of code are 1 to 8 hex digits"),
        ("cents", 1, "`column` cents: .* has no such categorical column; choose one of shop, code, tags"),
    ],
)
def test_lookups_without_an_answer(orders: tuple[Manifest, Path], column: str, id_or_text: int | str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _ = find_id(*orders, column, id_or_text) if isinstance(id_or_text, int) else find_text(*orders, column, id_or_text)


def test_command(orders: tuple[Manifest, Path]) -> None:
    data = ["--data", str(orders[1])]
    assert "category" in CliRunner().invoke(inspect, data).output
    result = CliRunner().invoke(inspect, [*data, "--column", "shop", "--text", "größe"])
    assert json.loads(result.output) == asdict(find_text(*orders, "shop", "größe"))
    for arguments in (["--column", "shop"], ["--column", "shop", "--id", "1", "--text", "a"], ["--id", "1"]):
        result = CliRunner().invoke(inspect, [*data, *arguments])
        assert str(result.exception) == "give --column with one of --id and --text, or none of them for the whole data set"


def test_table_of_columns(write_log: Callable[..., Path], tmp_path: Path) -> None:
    """Counts of 256 / rank at ranks 1, 2 and 4 follow Zipf's law with s = 1."""
    values = [f"{rank:x}" for rank in (1, 2, 3, 4) for _ in range(256 // rank)]
    rows = [["1", "-7", *[""] * 12, value] + [""] * 25 for value in values]
    manifest = make(write_log(rows), tmp_path / "data", val_fraction=0, test_fraction=0)
    text = to_text(manifest, tmp_path / "data")
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line}
    assert lines["train"] == ["train", str(len(values)), "rows", "label", "rate", "1.0000"]
    assert lines["I1"] == ["I1", "0.0%", "-7", "-7"]
    assert lines["I2"] == ["I2", "100.0%"]
    assert lines["C1"] == ["C1", "4", "5", "0.0%", f"{256 / len(values):.1%}", *["100.0%"] * 4, "1.00"]
