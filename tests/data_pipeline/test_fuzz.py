"""Any bytes as any log give a data set that verifies, or a one-line error and no output.

FUZZ=10000 pytest --timeout=0 tests/data_pipeline/test_fuzz.py        # number of cases; takes a quarter of an hour
"""

from __future__ import annotations

import gzip
import io
import os
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from consistency import verify
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from data_pipeline.manifest import read_manifest
from data_pipeline.preprocess import PreprocessOptions, preprocess
from data_pipeline.schema import Column, LogSchema

CASES = int(os.environ.get("FUZZ", "60"))
ANY = settings(max_examples=CASES // 3, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
KINDS = ("label", "integer", "int64", "float", "weight", "hex", "category", "list", "time", "ignore")
BYTES = st.binary(max_size=200) | st.lists(st.sampled_from([*b'0019af,\t|"\n\r {}[]:-.e\xc3\xa4\xff'])).map(bytes)
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r\0"), max_size=8) | st.sampled_from(
    ["7", "a b", '"', ","]
)


def schemas(draw: Any, kinds: tuple[str, ...] = KINDS) -> LogSchema:
    chosen = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=5))
    columns = tuple(Column(name=f"c{number}", kind=kind) for number, kind in enumerate(chosen))
    separator = draw(st.sampled_from([",", "\t", ";"]))
    format_name = draw(st.sampled_from(["text", "csv", "jsonl"]))
    return LogSchema(columns=columns, separator=separator, header=draw(st.booleans()), format=format_name)


def make(folder: Path, schema: LogSchema, content: bytes, **options: Any) -> Path | None:
    """Make a data set that verifies, or fail with one line and without output."""
    (folder / "log").write_bytes(content)
    output = folder / "data"
    line = ""
    try:
        preprocess(PreprocessOptions(inputs=(folder / "log",), output=output, schema=schema, workers=1, val_fraction=0, **options))
    except ValueError as error:
        line = str(error) or "an error without a line"
    if line:
        assert len(line.splitlines()) == 1
        assert {path.name for path in folder.iterdir()} <= {"log", ".data.partial"}  # finished work is kept
        return None
    verify(read_manifest(output), output)
    return output


@given(content=BYTES, data=st.data())
@ANY
def test_any_bytes(content: bytes, data: st.DataObject) -> None:
    schema = schemas(data.draw)
    compress = data.draw(st.sampled_from([lambda text: text, gzip.compress, lambda text: pa.compress(text, "zstd", asbytes=True)]))
    cut = data.draw(st.integers(0, 3))
    packed = compress(content)
    with tempfile.TemporaryDirectory() as folder:
        options = {"part_bytes": data.draw(st.sampled_from([7, 1 << 20])), "max_bad_rows": data.draw(st.sampled_from([0, 99]))}
        make(Path(folder), schema, packed[: len(packed) - cut], **options)


@given(
    rows=st.lists(st.lists(st.none() | TEXTS | st.integers() | st.floats() | st.booleans(), min_size=3, max_size=3)), data=st.data()
)
@ANY
def test_any_parquet(rows: list[list[Any]], data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=3, max_size=3))
    columns = {}
    for number, cells in enumerate(zip(*rows, strict=True) if rows else [(), (), ()]):
        of_type = data.draw(st.sampled_from([str, float, bool, int]))
        present = [cell if type(cell) is of_type and (of_type is not int or abs(cell) < 2**63) else None for cell in cells]
        columns[f"c{number}"] = pa.array(
            present, {str: pa.string(), float: pa.float64(), bool: pa.bool_(), int: pa.int64()}[of_type]
        )
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file, row_group_size=data.draw(st.integers(1, 5)))
    content = bytearray(file.getvalue())
    for _ in range(data.draw(st.integers(0, 2))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    schema = LogSchema(columns=tuple(Column(name=f"c{number}", kind=kind) for number, kind in enumerate(kinds)))
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), schema, bytes(content), max_bad_rows=data.draw(st.sampled_from([0, 99])))
