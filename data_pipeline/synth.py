"""Synthetic Criteo-format logs drawn from a planted model, with the scores of its true probabilities."""

import gzip
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
from tqdm import tqdm

from data_pipeline.atomic import check_output, replacing, resolved, write_json
from data_pipeline.errors import UserError
from data_pipeline.planted import DECAY, PlantedModel, PlantedRows
from data_pipeline.schema import CATEGORIES, INTEGERS, LABEL
from data_pipeline.work import work_folder

_BINS = 1 << 18
_CHUNK_ROWS = 1 << 16  # in memory at a time
# The four hex digits of every 16-bit number, as one 32-bit word.
_HEX_DIGITS = np.array([f"{number:04x}".encode() for number in range(1 << 16)], dtype="S4").view(np.uint32)


@dataclass(frozen=True, kw_only=True)
class SynthOptions:
    """Options of `synth`.

    Args:
        output: the log; a name ending in .gz compresses it.
        seed: of the model and of the draws.
        scale: multiplies the cardinalities of Criteo's Kaggle log.
        decay: how fast effects shrink with a value's frequency rank k: their standard deviations by (1 + k / 100)^-decay.
        groups: how much values that occur together have in common, from 0 to 1; see `data_pipeline.planted`.

    Raises:
        ValueError: an option is out of range.
    """

    rows: int
    output: Path
    seed: int = 0
    scale: float = 1.0
    decay: float = DECAY
    groups: float = 0.0
    overwrite: bool = False

    def __post_init__(self) -> None:
        for name, least in (("rows", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise UserError(f"`{name}` is {getattr(self, name)}; it must be at least {least}")
        if not 0 < self.scale <= 100:
            raise UserError(f"`scale` is {self.scale}; it must be above 0 and at most 100")
        if not 0 <= self.decay <= 10:
            raise UserError(f"`decay` is {self.decay}; it must be between 0 and 10")
        if not 0 <= self.groups <= 1:
            raise UserError(f"`groups` is {self.groups}; it must be between 0 and 1")


class _Scorer:
    """Scores true probabilities on drawn labels, chunk by chunk, with the AUC from a fine histogram of probabilities."""

    def __init__(self) -> None:
        self.counts = np.zeros((2, _BINS), np.int64)  # by label and bin
        self.logloss = 0.0

    def add(self, label: np.ndarray, probability: np.ndarray) -> None:
        bins = (probability * _BINS).astype(np.int64)
        for value in (0, 1):
            self.counts[value] += np.bincount(bins[label == value], minlength=_BINS)
        self.logloss -= float(np.log(np.where(label, probability, 1 - probability)).sum())

    def scores(self) -> dict[str, Any] | None:
        """Return the best that any model can expect; None if no rows were added."""
        negatives, positives = (int(total) for total in self.counts.sum(axis=1))
        rows = negatives + positives
        if not rows:
            return None
        rate, logloss = positives / rows, self.logloss / rows
        auc = ne = None
        if negatives and positives:
            # Count pairs in which the positive ranks above the negative; ties count half.
            below = np.cumsum(self.counts[0]) - self.counts[0] / 2
            auc = float((self.counts[1] * below).sum()) / (negatives * positives)
            ne = float(logloss / -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate)))
        return {"rows": rows, "label_rate": rate, "best_auc": auc, "best_logloss": logloss, "best_ne": ne}


def truth_path(output: Path) -> Path:
    """Return the path of a log's truth file: train.truth.json beside train.txt or train.txt.gz."""
    stem = output.with_suffix("") if output.suffix == ".gz" else output
    return stem.with_name(f"{stem.stem}.truth.json")


def synth(options: SynthOptions) -> dict[str, Any]:
    """Write a log and its truth file; both depend only on rows, seed, scale, decay and groups.

    Raises:
        ValueError: the output, or its truth file, exists.
        OSError: it cannot be written.

    Returns:
        The truth: what determines the log; rows, label_rate and the best best_auc, best_logloss and best_ne that any model can
        expect, of which the first and last are None if all labels are equal; and under "last_tenth" the same for the last tenth,
        the test rows of `comera preprocess`, if it has rows.
    """
    check_output(truth_path(resolved(options.output)), files=None, overwrite=options.overwrite)
    chosen: dict[str, Any] = {name: getattr(options, name) for name in ("seed", "scale", "decay", "groups")}
    model = PlantedModel(**chosen)
    uniform = np.random.default_rng([options.seed, 0])
    whole, last_tenth = _Scorer(), _Scorer()
    test_start, is_compressed = options.rows - options.rows // 10, options.output.suffix == ".gz"
    with (
        work_folder(options.output, identity={}, files=None, overwrite=options.overwrite, tell=lambda line: None) as work,
        replacing(work.data / options.output.name) as path,
        path.open("wb") as log,
        # Without name and time in the header, equal logs are equal files.
        gzip.GzipFile("", "wb", compresslevel=4, fileobj=log, mtime=0) if is_compressed else nullcontext(log) as file,
        tqdm(total=options.rows, desc="drawing", unit="row", unit_scale=True, disable=None) as bar,
    ):
        for start in range(0, options.rows, _CHUNK_ROWS):
            rows = model.rows(uniform.random((min(_CHUNK_ROWS, options.rows - start), model.draws)))
            _write_rows(rows, file)
            whole.add(rows.label, rows.probability)
            tail = slice(max(test_start - start, 0), None)
            last_tenth.add(rows.label[tail], rows.probability[tail])
            bar.update(len(rows.label))
    truth = chosen | {"last_tenth": last_tenth.scores()} | (whole.scores() or {})
    write_json(truth_path(options.output), truth)
    return truth


def _write_rows(rows: PlantedRows, file: IO[bytes] | gzip.GzipFile) -> None:
    columns = [pa.array(rows.label)]
    columns += [pa.array(rows.integers[name], mask=rows.missing[name]) for name in INTEGERS]
    columns += [_hex_column(rows.categories[name], rows.missing[name]) for name in CATEGORIES]
    table = pa.table(columns, names=[LABEL, *INTEGERS, *CATEGORIES])
    pa.csv.write_csv(table, file, pa.csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none"))


def _hex_column(value: np.ndarray, missing: np.ndarray) -> pa.Array:
    """Format values as 8 hex digits each, directly in the layout of Arrow strings: offsets and concatenated characters."""
    digits = np.stack([_HEX_DIGITS[value >> np.uint32(16)], _HEX_DIGITS[value & np.uint32(0xFFFF)]], axis=1)
    offsets = np.arange(0, 8 * len(value) + 1, 8, dtype=np.int32)
    present = np.packbits(~missing, bitorder="little")
    return pa.StringArray.from_buffers(len(value), pa.py_buffer(offsets), pa.py_buffer(digits), pa.py_buffer(present))
