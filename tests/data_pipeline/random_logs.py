"""Small random logs as rows of text cells, data sets made of logs, and what they hold."""

import random
from pathlib import Path
from typing import Any

import pandas as pd

from data_pipeline.manifest import Manifest
from data_pipeline.preprocess import PreprocessOptions, preprocess
from data_pipeline.schema import Column, Kind, LogSchema, Transform

Rows = list[list[str]]


def random_rows(count: int, *, seed: int = 0) -> Rows:
    """Draw rows with frequent, rare and single values, and about a quarter of the cells missing."""
    draw = random.Random(seed)

    def count_cell() -> str:
        return draw.choice(["", str(draw.randint(-2, 9)), str(int(draw.expovariate(0.001)))])

    def text_cell() -> str:
        return draw.choice(["", "0", f"{draw.randint(1, 4):08x}", f"{draw.getrandbits(32):08x}", f"{draw.randint(0, 40):X}"])

    return [[str(draw.randint(0, 1)), *(count_cell() for _ in range(13)), *(text_cell() for _ in range(26))] for _ in range(count)]


ROWS = random_rows(400)


def schema_of(kinds: dict[str, Kind], *, element_separator: str = "|", transform: Transform = "log", **settings: Any) -> LogSchema:
    """Return the schema of logs with columns of these kinds, separated by commas if nothing else is set."""
    same: dict[str, Any] = {"separator": element_separator, "transform": transform}
    columns = tuple(Column(name=name, kind=kind, **same) for name, kind in kinds.items())
    return LogSchema(columns=columns, **{"separator": ",", **settings})


def to_text(rows: Rows, newline: str = "\n") -> bytes:
    return "".join("\t".join(row) + newline for row in rows).encode()


def read(folder: Path, *splits: str) -> pd.DataFrame:
    """Read the rows of splits, or of all."""
    files = [path for split in splits or ("train", "val", "test") for path in sorted((folder / split).iterdir())]
    return pd.concat([pd.read_parquet(path) for path in files], ignore_index=True)


def files_of(folder: Path, *, manifest: bool = True) -> dict[str, bytes]:
    """Read all files of a data set by their names, without its manifest if so desired."""
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return files if manifest else {name: content for name, content in files.items() if name != "manifest.json"}


def make(log: Path | tuple[Path, ...], output: Path, **options: Any) -> Manifest:
    """Preprocess a log, or several."""
    return preprocess(PreprocessOptions(inputs=log if isinstance(log, tuple) else (log,), output=output, **options))
