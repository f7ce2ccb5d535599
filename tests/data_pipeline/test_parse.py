"""The fast parser, and the compiled loops for ids and counts, agree with the obvious ones, on well-formed and adversarial input."""

import tempfile
from collections import Counter as Counts
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_logs import schema_of

from data_pipeline import hashing, native
from data_pipeline.hashing import IdSource, encode_keys, write_table
from data_pipeline.native import Array
from data_pipeline.parse import REASONS_KEPT, Parsed, parse
from data_pipeline.reference import Cell, Malformed, hashed_id, parse_line
from data_pipeline.runs import Run, count_keys, merge, write_run
from data_pipeline.schema import Column, Kind, LogSchema, criteo_schema, detect_criteo_schema

CRITEO = criteo_schema(labeled=True)
KINDS: dict[str, Kind] = {"id": "ignore", "site": "category", "click": "label", "tags": "list"}
KINDS |= {"price": "integer", "device": "hex", "bought": "label"}
OTHER = LogSchema(columns=(*schema_of(KINDS).columns, Column(name="words", kind="list", separator=" ")), separator=",")
GOOD = b"\t".join([b"1"] + [b""] * 39)
DTYPES = [np.dtype(np.uint32), np.dtype(np.uint64)]


def cells_of(parsed: Parsed, schema: LogSchema, row: int) -> list[Cell]:
    """Convert a parsed row to the form of `parse_line`."""
    labels, integers, singles, lists = (iter(range(99)) for _ in range(4))
    cells: list[Cell] = []
    for column in schema.columns:
        match column.kind:
            case "ignore":
                cells.append(None)
            case "label":
                cells.append(int(parsed.labels[next(labels), row]))
            case "integer":
                i = next(integers)
                cells.append(None if parsed.integer_missing[i, row] else int(parsed.integers[i, row]))
            case "hex" | "category":
                i = next(singles)
                cells.append(None if parsed.key_missing[i, row] else int(parsed.keys[i, row]))
                assert cells[-1] is not None or parsed.keys[i, row] == 0
            case "list":
                i = next(lists)
                begin = parsed.list_ends[i, row - 1] if row else 0
                cells.append(parsed.list_keys[i][begin : parsed.list_ends[i, row]].tolist())
    return cells


def on_the_heap(text: bytes) -> np.ndarray:
    """Copy text without the zero byte that ends `bytes`, so that a sanitizer detects reads past the end."""
    return np.frombuffer(text, np.uint8).copy()


def assert_equals_reference(text: bytes, schema: LogSchema) -> None:
    expected, starts, rejected, start = [], [], [], 0
    for number, line in enumerate(text.split(b"\n")[:-1]):
        try:
            expected.append(parse_line(line, schema))
            starts.append(start)
        except Malformed as error:
            rejected.append((number, str(error)))
        start += len(line) + 1
    lines = text.count(b"\n")
    parsed = parse(on_the_heap(text), schema)
    assert [cells_of(parsed, schema, row) for row in range(parsed.rows)] == expected
    assert parsed.starts.tolist() == starts
    assert (parsed.lines, parsed.rejected, parsed.reasons) == (lines, len(rejected), tuple(rejected[:REASONS_KEPT]))


NUMBERS = st.one_of(
    st.text("0123456789abfABF-", max_size=12),
    st.sampled_from(["2147483647", "2147483648", "-2147483648", "-2147483649"]),
    st.sampled_from(
        ["1.0", "0.00", "-64.0", "2147483648.0", "1.", "-.0", ".0", "1.01", "1.0.0", "True", "false", "TRUE", "tRUE", "trueness"]
    ),
)
JUNK = st.text("01xX -+.,|\t\"'\r\\é\0", max_size=4)
CELLS = st.one_of(NUMBERS, JUNK, st.sampled_from(["a|b", "|", "a|", "|a", "a||b", "x y", "", "0", "1", "é|ü"]))
GOOD_ROWS = [["7", "x", "1", "a|b", "-5", "fF", "0", "x y z"], ["", "", "0", "", "", "", "1", ""]]
LINES = st.lists(st.lists(CELLS, min_size=7, max_size=9), max_size=4)


@settings(max_examples=300)
@given(lines=LINES, newline=st.sampled_from(["\n", "\r\n"]))
def test_lines_of_other_logs(lines: list[list[str]], newline: str) -> None:
    """Most of these lines are malformed; the good ones between them must keep their own list elements."""
    text = "".join(",".join(row) + newline for line in lines for row in (line, *GOOD_ROWS)).encode()
    assert parse(on_the_heap(text), OTHER).rows >= 2 * len(lines)
    assert_equals_reference(text, OTHER)


@settings(max_examples=200)
@given(text=st.binary(max_size=200))
def test_any_bytes(text: bytes) -> None:
    for schema in (CRITEO, OTHER, LogSchema(columns=(Column(name="tags", kind="list"),))):
        assert_equals_reference(text.replace(b"\x0b", b"\n") + b"\n", schema)


@pytest.mark.parametrize("kind", ["label", "integer", "hex"])
def test_every_byte_at_every_position(kind: str) -> None:
    """Cells of 1 to 9 bytes, which are read eight bytes at a time, in alternating good and malformed lines."""
    digits = b"-1234567" if kind == "integer" else b"1.000000" if kind == "label" else b"0aF9Af12"
    cells = [digits[:size] for size in range(9)] + [digits[:4] + digits]
    odd = [b"0x10", b"-", b"-0000000000002", b"9" * 40, b"123456789", b"01", b"1\r", *digits.split(b"4")]
    places = [(cell, place) for cell in cells for place in range(len(cell))]
    changed = [cell[:place] + bytes([byte]) + cell[place + 1 :] for cell, place in places for byte in range(256)]
    schema = LogSchema(columns=(Column(name="cell", kind=kind), Column(name="site", kind="category")))
    for end in (b"\tx\n", b"\tx\r\n"):
        assert_equals_reference(b"".join(cell + end for cell in cells + odd + changed), schema)
    last = replace(schema, columns=schema.columns[::-1])
    assert_equals_reference(b"".join(b"x\t" + cell + b"\n" for cell in cells + odd), last)


def test_room_for_lists_is_exact() -> None:
    """One long list among many columns doesn't make room in all of them."""
    schema = LogSchema(columns=tuple(Column(name=f"c{number}", kind="list") for number in range(50)))
    text = b"\t".join([b"|".join([b"a"] * 1000)] + [b"b"] * 49) + b"\n"
    assert_equals_reference(text * 3, schema)
    assert parse(on_the_heap(text * 3), schema).list_keys[0].base.size == 3 * (1000 + 49)


def test_schema_by_majority() -> None:
    unlabeled = GOOD[2:]
    assert not detect_criteo_schema(b"\n".join([unlabeled, GOOD, unlabeled, b""])).labels
    assert detect_criteo_schema(b"\n".join([unlabeled, GOOD, GOOD, b""])).labels
    assert not detect_criteo_schema(b"\t".join([b"1"] * 39)).labels, "keys may be decimals"


@settings(max_examples=100)
@given(data=st.data(), dtype=st.sampled_from(DTYPES), buckets=st.integers(2, 1 << 31), room=st.sampled_from([0, 30, 1 << 20]))
def test_ids_equal_the_reference(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, dtype: np.dtype, buckets: int, room: int
) -> None:
    """Ids by table, in memory or not, and by hash, for rows in the middle of an array."""
    key = st.one_of(st.integers(0, 9), st.integers(0, 2 ** (8 * dtype.itemsize) - 1))
    values = data.draw(st.lists(key, unique=True, max_size=20))
    path = tmp_path_factory.mktemp("table") / "C1.table"
    with patch.object(hashing, "_RANGE_BYTES", data.draw(st.sampled_from([64, 1 << 20]))):  # written at a time
        write_table(path, lambda: [np.array(values[:5], dtype), np.array(values[5:], dtype)], len(values), dtype)
    ids = {value: number for number, value in enumerate(values, start=1)}
    asked = data.draw(st.lists(st.tuples(key, st.booleans()), max_size=30))
    keys = np.array([[value for value, _ in asked] + [7]] * 2, dtype)[:, :-1]
    missing = np.array([[gone for _, gone in asked] + [True]] * 2, np.bool_)[:, :-1]
    got, zeros = encode_keys([IdSource(path, dtype, room), IdSource(buckets=buckets)], keys, missing)
    by_table = [0 if gone else ids.get(value, 0) for value, gone in asked]
    by_hash = [0 if gone else hashed_id(value, buckets) for value, gone in asked]
    assert got.tolist() == [by_table, by_hash]
    assert zeros.tolist() == [by_table.count(0), by_hash.count(0)]


@pytest.mark.parametrize("pairs", [[], [[1, 7], [2, 8]]])
def test_a_table_without_free_slots_is_searched_once(tmp_path: Path, pairs: list[list[int]]) -> None:
    """A search must end even in a table from an untrusted file."""
    np.array(pairs, np.uint32).tofile(tmp_path / "C1.table")
    keys = np.array([[1, 2, 3]], np.uint32)
    ids, _ = encode_keys([IdSource(tmp_path / "C1.table", keys.dtype)], keys, np.zeros((1, 3), np.bool_))
    assert ids.tolist() == ([[7, 8, 0]] if pairs else [[0, 0, 0]])


@pytest.mark.parametrize("offsets", [[0, 1 << 40, 5], [0, 3, 2], [-1, 0, 5], [0, 3, 6], [0, 5]])
def test_texts_beyond_their_bytes_are_refused(offsets: list[int]) -> None:
    arrays = (np.zeros(5, np.uint8), np.array(offsets, np.int64), np.zeros(2, np.uint64), np.zeros(2, np.bool_))
    with pytest.raises(RuntimeError, match="hash_texts: the sizes of the arrays don't fit each other"):
        native.hash_texts(*(Array(array, array.dtype) for array in arrays))


def test_arrays_of_other_sizes_are_refused() -> None:
    with pytest.raises(RuntimeError, match="the sizes of the arrays don't fit each other"):
        parse(on_the_heap(GOOD), CRITEO)  # which lacks the end of its line
    for keys, missing in (((1, 4), (1, 3)), ((1, 4), (2, 4)), ((2, 4), (2, 4))):
        with pytest.raises(RuntimeError, match="encode_keys_u32: the sizes of the arrays don't fit each other"):
            encode_keys([IdSource(buckets=5)], np.zeros(keys, np.uint32), np.zeros(missing, np.bool_))


def merged(runs: Sequence[Run], folder: Path, column: int, dtype: np.dtype, entries: int) -> dict[int, int]:
    pairs: list[tuple[int, int]] = []
    for keys, counts in merge(runs, folder, column, key_dtype=dtype, entries=entries):
        pairs += zip(keys.tolist(), counts.tolist(), strict=True)
    assert [key for key, _ in pairs] == sorted({key for key, _ in pairs}), "distinct and ascending"
    return dict(pairs)


@settings(max_examples=100)
@given(
    parts=st.lists(st.lists(st.one_of(st.integers(0, 5), st.integers(0, 2**32 - 1)), max_size=30), max_size=4),
    dtype=st.sampled_from(DTYPES),
    entries=st.integers(1, 40),
    trains=st.lists(st.booleans(), min_size=4, max_size=4),
    times=st.sampled_from([1, 1 << 32]),
)
def test_counts_equal_a_dictionary(parts: list[list[int]], dtype: np.dtype, entries: int, trains: list[bool], times: int) -> None:
    """Also counts beyond 32 bits."""
    with tempfile.TemporaryDirectory() as name:
        folder, runs, expected = Path(name), list[Run](), Counts[int]()
        for number, (keys, counts) in enumerate(zip(parts, trains, strict=False)):
            counted = [count_keys(np.array(column, dtype)) for column in (keys, keys[:1])]
            columns = [[(values, count * np.uint64(times))] for values, count in counted]
            runs.append(replace(write_run(folder / str(number), columns, count_bytes=4 if times == 1 else 8), trains=counts))
            expected.update({key: counts * times * count for key, count in Counts(keys).items()})
        assert merged(runs, folder, 0, dtype, entries) == dict(expected)
        assert merged(runs, folder, 1, dtype, entries).keys() == {keys[0] for keys in parts if keys}
