"""Export of a data set as NumPy files in the layout of torchrec's BinaryCriteoUtils, for `InMemoryBinaryCriteoIterDataPipe` etc.

OUTPUT/<split>_dense.npy float32 [n, I], <split>_sparse.npy int32 [n, C], <split>_labels.npy int32 [n, 1] for n rows, I integer
columns and C categorical columns; and <split>_weights.npy float32 [n, 1] if rows have weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from data_pipeline.atomic import finished, refuse_overlap
from data_pipeline.columns import LABEL
from data_pipeline.errors import UserError
from data_pipeline.manifest import MANIFEST_NAME, Manifest, write_manifest
from data_pipeline.verify import read_row_groups

FILES = (MANIFEST_NAME, "*_dense.npy", "*_sparse.npy", "*_labels.npy", "*_weights.npy")


def export_npy(manifest: Manifest, folder: Path, output: Path, *, overwrite: bool = False) -> None:
    """Write the files, row group by row group, and the manifest beside them.

    Raises:
        ValueError: the layout can't hold the data set (no label or several, lists of ids), or output must not be written.
    """
    refuse_overlap(output, "data", [folder], within=True)
    lists = [column.name for column in manifest.categorical_columns if column.is_list]
    if lists or len(manifest.labels) != 1:
        names = ", ".join(label.name for label in manifest.labels)
        contents = f"lists of ids in {lists[0]}" if lists else f"the labels {names}" if names else "no labels"
        raise UserError(
            f"{folder} has {contents}; torchrec's files hold exactly one label per row and one id per cell, "
            "so preprocess logs with one label and without lists"
        )
    parts: dict[str, tuple[list[str], npt.DTypeLike]] = {
        "dense": ([column.name for column in manifest.integer_columns], np.float32),
        "sparse": ([column.name for column in manifest.categorical_columns], np.int32),
        "labels": ([LABEL], np.int32),
    }
    if manifest.weight:
        parts["weights"] = ([manifest.weight.name], np.float32)
    with (
        finished(output, files=FILES, overwrite=overwrite) as work,
        tqdm(desc="exporting", total=len(parts) * manifest.rows.written, unit="row", unit_scale=True, disable=None) as bar,
    ):
        for name, split in manifest.splits.items():
            shards = [folder / shard.path for shard in split.shards]
            for part, (columns, dtype) in parts.items():
                for rows in _write_array(work / f"{name}_{part}.npy", shards, split.rows, columns, dtype):
                    bar.update(rows)
        write_manifest(manifest, work)


def _write_array(path: Path, shards: list[Path], rows: int, columns: list[str], dtype: npt.DTypeLike) -> Iterator[int]:
    """Write columns of shards as one array [rows, columns]; yield the number of rows of each row group written."""
    with path.open("wb") as file:
        header = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": (rows, len(columns))}
        np.lib.format.write_array_header_1_0(file, header)
        for shard in shards:
            for _, group in read_row_groups(shard, columns):
                cells = [group.column(column).to_numpy().astype(dtype, copy=False) for column in columns]
                if cells:
                    file.write(np.stack(cells, axis=1).data)
                yield len(group)
