"""A table of a data set's columns: missing and distinct values, and how many ids cover the rows."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from data_pipeline.manifest import Manifest, check_file

TOP = (1, 10, 100, 1_000, 10_000)


def to_text(manifest: Manifest, folder: Path) -> str:
    """Format aligned tables of the splits and the columns.

    `top k` is the share of the training split's values that have one of the first k ids, where values without an id count as not
    covered; it is left out if another data set's vocabularies encoded this one. `0 in test` is the share of the test split's ids
    that are 0.

    Raises:
        ValueError: a vocabulary is missing, or its size differs from the manifest's.
    """
    lines = []
    for name, split in manifest.splits.items():
        rates = [f"  {label.name} rate {label.split_means[name]:.4f}" for label in manifest.labels if split.rows]
        lines.append(f"{name:<6} {split.rows:>14,} rows" + "".join(rates))
    rows = [["integer", "missing", "min", "max"]]
    for integer in manifest.integer_columns:
        rows.append([integer.name, f"{integer.missing / manifest.rows.written:.1%}", _number(integer.min), _number(integer.max)])
    lines += ["", *_aligned(rows)] if len(rows) > 1 else []
    rows = [["category", "distinct", "ids", "missing", "0 in test", *(f"top {k:,}" for k in TOP)]]
    test = manifest.splits["test"].rows
    for column in manifest.categorical_columns:
        zeros = f"{column.rows_at_zero['test'] / test:.1%}" if test and not column.is_list else ""
        missing = f"{column.missing / manifest.rows.written:.1%}"
        counts = np.empty(0, np.int64)
        if column.vocabulary and not manifest.transformed:
            counts = pq.read_table(check_file(column.vocabulary, folder), columns=["count"]).column("count").to_numpy()
        cells = [column.name, _number(column.distinct), f"{column.num_embeddings:,}", missing, zeros]
        rows.append([*cells, *_coverage(counts, column.rows_at_zero["train"])])
    return "\n".join(lines + (["", *_aligned(rows)] if len(rows) > 1 else []))


def _coverage(counts: np.ndarray, zeros: int) -> list[str]:
    covered = np.cumsum(counts)
    return [f"{covered[min(k, len(covered)) - 1] / (covered[-1] + zeros):.1%}" if len(covered) else "" for k in TOP]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
