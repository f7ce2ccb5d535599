""".npy files that torchrec's functions or ours wrote, read as logs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from random_logs import random_rows
from torchrec.datasets.criteo import BinaryCriteoUtils

from data_pipeline.manifest import Manifest
from data_pipeline.npy import export_npy
from data_pipeline.preprocess import PreprocessOptions, preprocess
from data_pipeline.verify import verify

ROWS = 500


def save(folder: Path, sparse: np.ndarray, name: str = "day_0", **others: np.ndarray) -> Path:
    """Save a triplet of files, random except for the given arrays."""
    draw = np.random.default_rng(len(sparse))
    arrays = {
        "dense": draw.normal(size=(len(sparse), 13)).astype(np.float32),
        "labels": draw.integers(0, 2, (len(sparse), 1)).astype(np.int32),
        "sparse": sparse,
    }
    for part, array in (arrays | others).items():
        np.save(folder / f"{name}_{part}.npy", array)
    return folder / f"{name}_sparse.npy"


def random_sparse(rows: int = ROWS, dtype: str = "int64") -> np.ndarray:
    draw = np.random.default_rng(0)
    values = draw.integers(0, 2**32, 40)
    values[0] = 0
    return values[(draw.random((rows, 26)) ** 3 * 40).astype(int)].astype(dtype)


def read_all(folder: Path, manifest: Manifest) -> pd.DataFrame:
    return pd.concat([pd.read_parquet(folder / shard.path) for split in manifest.splits.values() for shard in split.shards])


def ids_of(column: np.ndarray, train: int, min_count: int) -> list[int]:
    """Ids by training frequency; 0 is missing or rare."""
    counts = Counter(int(value) for value in column[:train] if value)
    frequent = sorted((value for value in counts if counts[value] >= min_count), key=lambda value: (-counts[value], value))
    ids = {value: number for number, value in enumerate(frequent, start=1)}
    return [ids.get(int(value), 0) for value in column]


@pytest.mark.filterwarnings("ignore:Local function is not supported by pickle", "ignore:unclosed file")  # warnings of torchrec
def test_what_torchrec_wrote(tmp_path: Path, write_log: Callable[..., Path]) -> None:
    files = [str(tmp_path / f"day_0_{part}.npy") for part in ("dense", "sparse", "labels")]
    BinaryCriteoUtils.tsv_to_npys(str(write_log(random_rows(ROWS))), *files)
    BinaryCriteoUtils.sparse_to_contiguous([files[1]], str(tmp_path), frequency_threshold=3)
    for name in ("day_0_sparse.npy", "day_0_sparse_contig_freq.npy"):
        output = tmp_path / name.removesuffix(".npy")
        manifest = preprocess(PreprocessOptions(inputs=(tmp_path / name,), output=output, part_bytes=20_000, min_count=2))
        verify(manifest, output)
        assert len(manifest.splits["train"].shards) > 2
        read, sparse = read_all(output, manifest), np.load(tmp_path / name)
        np.testing.assert_array_equal(read[[f"I{i}" for i in range(1, 14)]], np.load(files[0]))
        np.testing.assert_array_equal(read[["label"]], np.load(files[2]))
        for column in range(26):
            assert read[f"C{column + 1}"].tolist() == ids_of(sparse[:, column], ROWS * 8 // 10, 2)


def test_export_and_import(tmp_path: Path, write_log: Callable[..., Path]) -> None:
    """A data set that is exported and read again keeps its ids, because they are ordered by frequency."""
    options = PreprocessOptions(inputs=(write_log(random_rows(ROWS)),), output=tmp_path / "data", val_fraction=0, test_fraction=0)
    manifest = preprocess(options)
    export_npy(manifest, options.output, tmp_path / "npy")
    again = PreprocessOptions(
        inputs=(tmp_path / "npy/train_sparse.npy",), output=tmp_path / "again", val_fraction=0, test_fraction=0
    )
    pd.testing.assert_frame_equal(read_all(again.output, preprocess(again)), read_all(options.output, manifest))


def test_wrapped_and_wide_numbers_are_the_same(tmp_path: Path) -> None:
    """Scripts store 32-bit values as int32, where the upper half is negative, or as int64."""
    frames = []
    for dtype in ("int64", "int32", "uint32"):
        (tmp_path / dtype).mkdir()
        log = save(tmp_path / dtype, random_sparse().astype(np.uint32).astype(dtype))
        options = PreprocessOptions(inputs=(log,), output=tmp_path / dtype / "data", split="random", seed=3)
        frames.append(read_all(options.output, preprocess(options)))
    pd.testing.assert_frame_equal(frames[0], frames[1])
    pd.testing.assert_frame_equal(frames[0], frames[2])


BAD = random_sparse().astype(np.int64)
BAD[7, 3] = 2**32


@pytest.mark.parametrize(
    ("sparse", "others", "message"),
    [
        (BAD, {}, r"day_0_sparse.npy:8: C4 '4294967296' is not 1 to 8 hex digits; fix the log"),
        (random_sparse(), {"labels": np.full((ROWS, 1), -1)}, "day_0_sparse.npy:1: label '-1' is not 0 or 1"),
        (random_sparse(), {"dense": np.full((ROWS, 13), np.nan)}, "day_0_sparse.npy:1: I1 'nan' is not a finite number"),
        (random_sparse(), {"dense": np.ones((ROWS - 1, 13))}, r"day_0_dense.npy has shape \[499, 13\], .* has 500 rows"),
        (random_sparse(), {"labels": np.ones((ROWS, 2), int)}, r"day_0_labels.npy has shape \[500, 2\]"),
        (random_sparse().astype(float), {}, r"day_0_sparse.npy holds float64 \[500, 26\], rows first; write integers"),
        (np.asfortranarray(random_sparse()), {}, "columns first; write integers"),
    ],
)
def test_bad_files(tmp_path: Path, sparse: np.ndarray, others: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        preprocess(PreprocessOptions(inputs=(save(tmp_path, sparse, **others),), output=tmp_path / "data"))


def test_incomplete(tmp_path: Path) -> None:
    log = save(tmp_path, random_sparse())
    (tmp_path / "day_0_labels.npy").rename(tmp_path / "labels.npy")
    with pytest.raises(ValueError, match=r"day_0_labels.npy does not exist"):
        preprocess(PreprocessOptions(inputs=(log,), output=tmp_path / "data"))
    with pytest.raises(ValueError, match=r"day_0_dense.npy: give only the sparse .npy files, such as day_0_sparse.npy"):
        preprocess(PreprocessOptions(inputs=(tmp_path / "day_0_dense.npy",), output=tmp_path / "data"))
    (tmp_path / "labels.npy").rename(tmp_path / "day_0_labels.npy")
    log.write_bytes(log.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"day_0_sparse.npy is not a whole .npy file \(.*\); write it again"):
        preprocess(PreprocessOptions(inputs=(log,), output=tmp_path / "data"))
