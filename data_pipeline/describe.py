"""Descriptions of data sets: missing values, skew and label rates, as tables for the terminal or as a self-contained HTML page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import jinja2
import numpy as np
import pyarrow.parquet as pq
from tqdm import tqdm

from data_pipeline.atomic import replacing, require_page
from data_pipeline.manifest import SPLITS, CategoricalColumn, IntegerColumn, Manifest, Shard
from data_pipeline.verify import ids_of, read_row_groups

TOP = (1, 10, 100, 1_000, 10_000)
_POINTS = 60
_BINS = 32


@dataclass(frozen=True, kw_only=True)
class CategoryDescription:
    """A categorical column.

    All members but distinct, missing and test_zeros cover the training split, or all splits if another data set's vocabularies
    encoded them; distinct and missing cover the whole input.

    coverage: share of the values (in list columns, of the elements) that have one of the first k ids, for k in TOP; values without
        an id count as not covered.
    zipf: the best s for count ~ rank^-s, by least squares of logarithms at ranks 1, 2, 4, ...; None below 3 points.
    ranks, shares: points of the curve of counts, as shares of all values.
    test_zeros: share of the test split's ids that are 0: missing, rare or unseen.
    """

    name: str
    distinct: int | None
    num_embeddings: int
    missing: float
    test_zeros: float | None
    coverage: tuple[float, ...]
    zipf: float | None
    ranks: tuple[int, ...]
    shares: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class IntegerDescription:
    """An integer column; bins are a histogram of the stored values, without the missing ones if they are logarithms."""

    name: str
    missing: float
    min: float | None
    max: float | None
    bins: tuple[int, ...]
    edges: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Description:
    """A data set."""

    manifest: Manifest
    integers: tuple[IntegerDescription, ...]
    categories: tuple[CategoryDescription, ...]


def describe(manifest: Manifest, folder: Path) -> Description:
    """Read the vocabularies' counts, or count ids if the vocabularies are another data set's, and bin the integer columns.

    Raises:
        ValueError: a file can't be read.
    """
    return Description(
        manifest=manifest,
        integers=_describe_integers(manifest, folder),
        categories=tuple(_describe_category(column, manifest, folder) for column in manifest.categorical_columns),
    )


def _describe_category(column: CategoricalColumn, manifest: Manifest, folder: Path) -> CategoryDescription:
    test = manifest.splits["test"].rows
    counts, zeros = np.empty(0, np.int64), column.rows_at_zero["train"]
    if manifest.transformed and column.vocabulary:
        zeros, *id_counts = _count_ids(column, manifest, folder)
        counts = np.array(id_counts, np.int64)
    elif column.vocabulary:
        counts = pq.read_table(folder / column.vocabulary.path, columns=["count"]).column("count").to_numpy()
    values = int(counts.sum()) + zeros
    covered = np.cumsum(counts)
    counts = np.sort(counts[counts > 0])[::-1]
    ranks = np.unique(np.geomspace(1, max(len(counts), 1), _POINTS).astype(np.int64))[: len(counts)]
    powers = 2 ** np.arange(len(counts).bit_length())
    fit = np.polyfit(np.log(powers), np.log(counts[powers - 1]), 1) if len(powers) > 2 else None
    return CategoryDescription(
        name=column.name,
        distinct=column.distinct,
        num_embeddings=column.num_embeddings,
        missing=column.missing / manifest.rows.written,
        test_zeros=column.rows_at_zero["test"] / test if test and not column.is_list else None,
        coverage=tuple(float(covered[min(k, len(covered)) - 1]) / max(values, 1) for k in TOP) if len(covered) else (),
        zipf=-float(fit[0]) if fit is not None else None,
        ranks=tuple(map(int, ranks)),
        shares=tuple(float(counts[rank - 1]) / values for rank in ranks),
    )


def _count_ids(column: CategoricalColumn, manifest: Manifest, folder: Path) -> np.ndarray:
    """Count how often each id occurs."""
    counts = np.zeros(column.num_embeddings, np.int64)
    for shard in _shards(manifest):
        for _, group in read_row_groups(folder / shard.path, [column.name]):
            counts += np.bincount(ids_of(group, column.name, is_list=column.is_list), minlength=len(counts))
    return counts


def _shards(manifest: Manifest) -> tuple[Shard, ...]:
    """Return the training split's shards, or all shards if the vocabularies are another data set's."""
    names = SPLITS if manifest.transformed else ("train",)
    return tuple(shard for name in names for shard in manifest.splits[name].shards)


def _describe_integers(manifest: Manifest, folder: Path) -> tuple[IntegerDescription, ...]:
    columns = manifest.integer_columns
    names = [column.name for column in columns]
    edges = [_edges(column, manifest, folder) for column in columns]
    bins = np.zeros((len(columns), _BINS), np.int64)
    shards = _shards(manifest) if columns else ()
    for shard in tqdm(shards, desc="describing", unit="file", disable=None):
        for _, group in read_row_groups(folder / shard.path, names):
            for i, name in enumerate(names):
                values = group.column(name).to_numpy()
                present = values[values > 0] if columns[i].transform == "log" else values
                bins[i] += np.histogram(present.clip(*edges[i]), _BINS, edges[i])[0]  # float32 may round past an edge
    return tuple(
        IntegerDescription(
            name=column.name,
            missing=column.missing / manifest.rows.written,
            min=column.min,
            max=column.max,
            bins=tuple(map(int, bins[i])),
            edges=edges[i],
        )
        for i, column in enumerate(columns)
    )


def _edges(column: IntegerColumn, manifest: Manifest, folder: Path) -> tuple[float, float]:
    """Return the least and greatest stored value, from the manifest for logarithms, else from the shards."""
    if column.transform == "log":
        return float(np.log(2)), float(np.log(max((column.max or 0) + column.offset, 3)))
    low, high = np.inf, -np.inf
    for shard in _shards(manifest):
        for _, group in read_row_groups(folder / shard.path, [column.name]):
            values = group.column(column.name).to_numpy()
            low, high = min(low, float(values.min())), max(high, float(values.max()))
    return low, high


def to_text(description: Description) -> str:
    """Format a description as aligned tables."""
    manifest = description.manifest
    lines = []
    for name, split in manifest.splits.items():
        rates = [f"  {label.name} rate {label.split_means[name]:.4f}" for label in manifest.labels if split.rows]
        lines.append(f"{name:<6} {split.rows:>14,} rows" + "".join(rates))
    rows = [["integer", "missing", "min", "max"]]
    rows += [[i.name, f"{i.missing:.1%}", _number(i.min), _number(i.max)] for i in description.integers]
    lines += ["", *_aligned(rows)] if description.integers else []
    rows = [["category", "distinct", "ids", "missing", "0 in test", *(f"top {k:,}" for k in TOP), "Zipf s"]]
    for c in description.categories:
        covered = [f"{share:.1%}" for share in c.coverage] or [""] * len(TOP)
        zeros = f"{c.test_zeros:.1%}" if c.test_zeros is not None else ""
        exponent = f"{c.zipf:.2f}" if c.zipf is not None else ""
        rows.append([c.name, _number(c.distinct), f"{c.num_embeddings:,}", f"{c.missing:.1%}", zeros, *covered, exponent])
    return "\n".join(lines + (["", *_aligned(rows)] if description.categories else []))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def write_html(description: Description, path: Path) -> None:
    """Write a page with the tables, a histogram of each integer column and a curve of counts for each category.

    Raises:
        ValueError: the path holds something that is no page.
    """
    require_page(path)
    environment = jinja2.Environment(loader=jinja2.PackageLoader("data_pipeline", "."), autoescape=True, trim_blocks=True)
    page = environment.get_template("describe.html.j2").render(description=description, top=TOP, curve=_curve, bars=_bars)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(page)


def _curve(category: CategoryDescription) -> str:
    """Return the points of a 200 x 60 SVG polyline of log share against log rank: ranks up to 10^8, shares down to 10^-8."""
    x = 25 * np.log10(category.ranks)
    y = -7.5 * np.log10(np.maximum(category.shares, 1e-8))
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))


def _bars(integer: IntegerDescription) -> list[float]:
    """Return the heights of bars in an SVG of height 60."""
    highest = max(integer.bins) or 1
    return [round(60 * count / highest, 1) for count in integer.bins]
