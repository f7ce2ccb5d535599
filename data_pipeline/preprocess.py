"""Raw Criteo logs to a data set: DATA/{train,val,test}/part-*.parquet, DATA/vocabulary/C*.parquet, DATA/manifest.json.

1. `ingest` parses the text once into an Arrow file of nullable integers, which the next steps map into memory;
2. the rows are split in their order, and vocabularies and integer statistics are taken from the training split alone;
3. each shard is encoded and written, one row group at a time.

Memory follows the number of distinct values, not the number of rows. Room for the Arrow file, about 160 bytes a row, is needed
beside the output while it runs.
"""

from __future__ import annotations

import math
import platform
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from tqdm import tqdm

from data_pipeline.atomic import finished_folder
from data_pipeline.columns import CATEGORIES, INTEGERS, LABEL
from data_pipeline.ingest import WORKERS, Rejects, check_inputs, ingest
from data_pipeline.manifest import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST_NAME,
    CategoricalColumn,
    IntegerColumn,
    Label,
    Manifest,
    RowCounts,
    write_manifest,
)
from data_pipeline.shards import Encoder, WrittenSplit, describe_file, write_splits
from data_pipeline.vocabulary import Vocabulary

_RECORDED_OPTIONS = ("min_count", "val_fraction", "test_fraction", "rows_per_shard", "max_bad_rows")


@dataclass(frozen=True, kw_only=True)
class PreprocessOptions:
    """What to read and how to encode it.

    Args:
        inputs: logs, in chronological order.
        output: the data set's folder, new or empty.
        min_count: a category value needs this many training rows for an id of its own; rarer ones share id 0. The default of 2
            leaves out values seen once: they teach nothing beyond their row, while together they train the row of id 0, which
            every value unseen in training will use.
        val_fraction: share of the rows, before the test rows, for validation.
        test_fraction: share of the rows, the last ones, for the test.
        rows_per_shard: rows of a Parquet file.
        max_bad_rows: malformed lines that may be dropped before the run stops.
        overwrite: replace a finished data set.
        chunk_bytes: text parsed at a time.

    Raises:
        ValueError: an option is out of range.
    """

    inputs: tuple[Path, ...]
    output: Path
    min_count: int = 2
    val_fraction: float = 0.1
    test_fraction: float = 0.1
    rows_per_shard: int = 1 << 18
    max_bad_rows: int = 0
    overwrite: bool = False
    chunk_bytes: int = 8 << 20

    def __post_init__(self) -> None:
        if not self.inputs:
            raise ValueError("--input names no file; give at least one")
        for name, least in (("min_count", 1), ("rows_per_shard", 1), ("max_bad_rows", 0), ("chunk_bytes", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{_flag(name)} is {getattr(self, name)}; it must be at least {least}")
        for name in ("val_fraction", "test_fraction"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{_flag(name)} is {getattr(self, name)}; it must be at least 0 and below 1")
        if self.val_fraction + self.test_fraction >= 1:
            raise ValueError(
                f"--val-fraction {self.val_fraction} and --test-fraction {self.test_fraction} leave no training rows; "
                "their sum must be below 1"
            )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def preprocess(options: PreprocessOptions) -> Manifest:
    """Write the data set, whole or not at all, and return its manifest.

    Raises:
        ValueError: an input is missing, damaged or malformed, or the output exists; one line that says what to do.
        OSError: the output cannot be written.
    """
    check_inputs(options.inputs)
    rejects = Rejects(max_bad_rows=options.max_bad_rows)
    with finished_folder(options.output, marker=MANIFEST_NAME, overwrite=options.overwrite) as work:
        parsed = work / "rows.arrow"
        files = ingest(options.inputs, parsed, rejects=rejects, chunk_bytes=options.chunk_bytes)
        with pa.memory_map(str(parsed)) as mapped:
            rows = pa.ipc.open_file(mapped).read_all()
            splits = _split(rows, options)
            integers = tuple(_integer_column(name, rows, splits["train"]) for name in INTEGERS)
            vocabularies = _count(splits["train"], options.min_count)
            encoder = Encoder(labelled=LABEL in rows.column_names, integers=integers, vocabularies=vocabularies)
            written = write_splits(splits, encoder, work, rows_per_shard=options.rows_per_shard)
            categories = _categorical_columns(vocabularies, rows, written, work, options.min_count)
            label = _label(rows, splits) if encoder.labelled else None
        parsed.unlink()
        manifest = Manifest(
            format=FORMAT,
            format_version=FORMAT_VERSION,
            versions=_versions(),
            options={name: getattr(options, name) for name in _RECORDED_OPTIONS},
            inputs=files,
            rows=RowCounts(read=sum(file.rows_in for file in files), written=len(rows), rejected=rejects.count),
            rejected_lines=tuple(rejects.lines),
            label=label,
            integer_columns=integers,
            categorical_columns=categories,
            splits={name: part.split for name, part in written.items()},
        )
        write_manifest(manifest, work)
    return manifest


def _split(rows: pa.Table, options: PreprocessOptions) -> dict[str, pa.Table]:
    """Contiguous train, val and test rows; val and test are rounded down."""
    total = len(rows)
    # Rounding first keeps 0.29 * 100 = 28.999999999999996 from losing a row.
    val, test = (math.floor(round(total * fraction, 6)) for fraction in (options.val_fraction, options.test_fraction))
    train = total - val - test
    if train < 1:
        raise ValueError(f"--input holds {total} well-formed lines, which leaves no row for training; give more")
    return {"train": rows.slice(0, train), "val": rows.slice(train, val), "test": rows.slice(train + val, test)}


def _integer_column(name: str, rows: pa.Table, train: pa.Table) -> IntegerColumn:
    bounds = pc.min_max(train.column(name)).as_py()
    # 2 - min makes the smallest value log(2) > 0. Where training holds no value, later ones are taken to be counts from 0.
    offset = 2 - (bounds["min"] or 0)
    return IntegerColumn(name=name, missing=rows.column(name).null_count, offset=offset, min=bounds["min"], max=bounds["max"])


def _count(train: pa.Table, min_count: int) -> dict[str, Vocabulary]:
    with ThreadPoolExecutor(WORKERS) as pool:
        counted = pool.map(lambda name: Vocabulary(train.column(name), min_count=min_count), CATEGORIES)
        return dict(
            zip(CATEGORIES, tqdm(counted, total=len(CATEGORIES), desc="counting", unit="column", disable=None), strict=True)
        )


def _categorical_columns(
    vocabularies: dict[str, Vocabulary], rows: pa.Table, written: dict[str, WrittenSplit], folder: Path, min_count: int
) -> tuple[CategoricalColumn, ...]:
    """Write the vocabularies and describe their columns."""
    (folder / "vocabulary").mkdir()
    columns = []
    for name, vocabulary in vocabularies.items():
        path = f"vocabulary/{name}.parquet"
        vocabulary.write(folder / path)
        columns.append(
            CategoricalColumn(
                name=name,
                num_embeddings=vocabulary.num_embeddings,
                distinct=pc.count_distinct(rows.column(name), mode="only_valid").as_py(),
                missing=rows.column(name).null_count,
                min_count=min_count,
                rows_at_zero={split: part.rows_at_zero[name] for split, part in written.items()},
                vocabulary=describe_file(path, folder, rows=len(vocabulary.values)),
            )
        )
    return tuple(columns)


def _label(rows: pa.Table, splits: dict[str, pa.Table]) -> Label:
    return Label(
        mean=pc.mean(rows.column(LABEL)).as_py(),
        split_means={name: pc.mean(part.column(LABEL)).as_py() for name, part in splits.items()},
    )


def _versions() -> dict[str, str]:
    packages = ("comera-rec", "numpy", "pandas", "pyarrow")
    return {"python": platform.python_version()} | {package: metadata.version(package) for package in packages}
