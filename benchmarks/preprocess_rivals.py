"""Ways from logs to a data set, one per process: `python -m benchmarks.preprocess_rivals NAME OUTPUT LOG` prints time and memory.

comera-rec; a plain pandas script, which is also the tests' oracle; the same in SQL for DuckDB; and torchrec's own functions.
"""

import contextlib
import importlib
import io
import json
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from data_pipeline.manifest import Order
from data_pipeline.preprocess import PreprocessOptions, preprocess
from data_pipeline.schema import CATEGORIES, INTEGERS

_ROWS_AT_A_TIME = 250_000
MEMORY_LIMIT = 1 << 30


def preprocess_with_pandas(log: Path, output: Path, *, min_count: int = 2, val: float = 0.1, test: float = 0.1) -> None:
    """Write a labeled log's last tenths and the rest as Parquet files, encoded as `comera preprocess` does.

    A script that a pandas user would write in an afternoon: it holds the whole log in memory, hex texts as numbers.
    """
    frame = pd.concat(_read(log), ignore_index=True)
    rows_val, rows_test = int(len(frame) * val), int(len(frame) * test)
    train = frame[: len(frame) - rows_val - rows_test]
    for name in INTEGERS:
        low = train[name].min() if train[name].notna().any() else 0
        logarithms = np.log(frame[name].clip(lower=low).to_numpy() + 2 - low)
        frame[name] = np.nan_to_num(logarithms).astype(np.float32)
    for name in CATEGORIES:
        counts = train.loc[train[name] >= 0, name].value_counts().rename_axis("value").reset_index(name="count")
        frequent = counts[counts["count"] >= min_count].sort_values(["count", "value"], ascending=[False, True])
        index = pd.Index(frequent["value"].to_numpy())
        frame[name] = (index.get_indexer(pd.Index(frame[name].to_numpy())) + 1).astype(np.int32)
    edges = {"train": (0, len(train)), "val": (len(train), len(train) + rows_val), "test": (len(train) + rows_val, len(frame))}
    output.mkdir(parents=True)
    for split, (start, stop) in edges.items():
        frame[start:stop].to_parquet(output / f"{split}.parquet", index=False)


def _read(log: Path) -> Iterator[pd.DataFrame]:
    """Read the log in parts: label int8, integers float64 with NaN for missing values, categories int64 with -1 for them."""
    types: dict[str, str] = {"label": "int8"} | dict.fromkeys(INTEGERS, "float64") | dict.fromkeys(CATEGORIES, "str")
    names = list(types)
    for part in pd.read_csv(log, sep="\t", names=names, dtype=types, chunksize=_ROWS_AT_A_TIME):
        for name in CATEGORIES:
            codes, texts = pd.factorize(part[name])
            values = np.array([int(text, 16) for text in texts] + [-1], np.int64)
            part[name] = values[codes]
        yield part


def preprocess_with_duckdb(log: Path, output: Path, *, min_count: int = 2, val: float = 0.1, test: float = 0.1) -> None:
    """Write the same files: the log is in a database on disk, with a table per vocabulary and one query for all joins."""
    output.mkdir(parents=True)
    types = {"label": "TINYINT"} | dict.fromkeys(INTEGERS, "INTEGER") | dict.fromkeys(CATEGORIES, "VARCHAR")
    with importlib.import_module("duckdb").connect(str(output / "log.duckdb")) as database:
        database.execute(f"SET memory_limit = '{MEMORY_LIMIT >> 20} MiB'")
        database.execute(f"CREATE TABLE log AS FROM read_csv('{log}', delim = '\t', header = false, columns = {types})")
        ((rows,),) = database.execute("SELECT count(*) FROM log").fetchall()
        rows_val, rows_test = int(rows * val), int(rows * test)
        train = rows - rows_val - rows_test
        minima = ", ".join(f"min({name})" for name in INTEGERS)
        (lows,) = database.execute(f"SELECT {minima} FROM log WHERE rowid < {train}").fetchall()
        for name in CATEGORIES:
            database.execute(
                f"CREATE TABLE ids_{name} AS SELECT {name}, row_number() OVER (ORDER BY count(*) DESC, {name}) AS id FROM log "
                f"WHERE rowid < {train} AND {name} IS NOT NULL GROUP BY {name} HAVING count(*) >= {min_count}"
            )
        cells = ["label"]
        for name, low in zip(INTEGERS, (low or 0 for low in lows), strict=True):
            logarithm = f"ln(greatest(log.{name}, {low}) + {2 - low})"
            cells.append(f"CASE WHEN log.{name} IS NULL THEN 0 ELSE {logarithm} END::FLOAT AS {name}")
        cells += [f"coalesce(ids_{name}.id, 0)::INTEGER AS {name}" for name in CATEGORIES]
        joins = " ".join(f"LEFT JOIN ids_{name} ON log.{name} = ids_{name}.{name}" for name in CATEGORIES)
        for split, start, stop in (("train", 0, train), ("val", train, train + rows_val), ("test", train + rows_val, rows)):
            database.execute(
                f"COPY (SELECT {', '.join(cells)} FROM log {joins} WHERE log.rowid >= {start} AND log.rowid < {stop} "
                f"ORDER BY log.rowid) TO '{output / split}.parquet' (FORMAT parquet)"
            )
    (output / "log.duckdb").unlink()


def preprocess_with_torchrec(log: Path, output: Path, *, min_count: int = 2) -> None:
    """Write torchrec's .npy files with contiguous ids, by first occurrence over all rows, 1 for rare values."""
    output.mkdir(parents=True)
    torchrec = importlib.import_module("torchrec.datasets.criteo").BinaryCriteoUtils
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
        dense, sparse, labels = (str(output / f"day_0_{part}.npy") for part in ("dense", "sparse", "labels"))
        torchrec.tsv_to_npys(str(log), dense, sparse, labels)
        torchrec.sparse_to_contiguous([sparse], str(output), frequency_threshold=min_count)


def preprocess_with_us(log: Path, output: Path, *, order: Order = "frequency") -> None:
    """Run `comera preprocess` under the memory limit."""
    preprocess(PreprocessOptions(inputs=(log,), output=output, memory_limit=MEMORY_LIMIT, order=order))


PROVIDERS: dict[str, Callable[[Path, Path], None]] = {
    "comera-rec": preprocess_with_us,
    "comera-rec, by similarity": partial(preprocess_with_us, order="similarity"),
    "pandas": preprocess_with_pandas,
    "duckdb": preprocess_with_duckdb,
    "torchrec": preprocess_with_torchrec,
}


def main(name: str, output: str, log: str) -> None:
    """Run one provider and print its ms, CPU ms and peak MiB; no provider starts further processes."""
    if module := {"torchrec": "torchrec.datasets.criteo", "duckdb": "duckdb"}.get(name):
        importlib.import_module(module)  # before the clock starts, and only here, because it takes memory
    start, cpu = time.perf_counter(), time.process_time()
    PROVIDERS[name](Path(log), Path(output))
    ms, cpu_ms = 1000 * (time.perf_counter() - start), 1000 * (time.process_time() - cpu)
    # Not getrusage's ru_maxrss: a child's starts at its parent's peak. `harness.memory` would import torch, which takes memory.
    peak = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert peak, "Linux reports the peak"
    print(json.dumps([ms, cpu_ms, int(peak[1]) / 1024]))


if __name__ == "__main__":
    main(*sys.argv[1:])
