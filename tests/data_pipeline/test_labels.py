"""Several labels, and weights of rows: stored values equal the log's in every format, and mistakes are reported in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from test_formats import files_of, read

from data_pipeline.manifest import Label, Manifest, read_manifest
from data_pipeline.npy import export_npy
from data_pipeline.preprocess import PreprocessOptions, preprocess
from data_pipeline.schema import read_schema
from data_pipeline.transform import TransformOptions, transform
from data_pipeline.verify import verify

ROWS = 300
TWO = {"click": "label", "buy": "label", "importance": "weight", "shop": "category", "cents": "integer"}


def log() -> pd.DataFrame:
    draw = np.random.default_rng(5)
    columns = {"click": draw.integers(0, 2, ROWS), "buy": (draw.random(ROWS) < 0.1).astype(int)}
    columns |= {"importance": draw.exponential(1, ROWS).round(3), "shop": draw.choice(["a", "b", "c"], ROWS)}
    return pd.DataFrame(columns | {"cents": draw.integers(0, 99, ROWS)})


def options(tmp_path: Path, frame: pd.DataFrame, name: str = "log.csv", kinds: dict[str, str] = TWO) -> PreprocessOptions:
    path, schema = tmp_path / name, tmp_path / "schema.toml"
    if path.suffix == ".parquet":
        frame.to_parquet(path)
    elif path.suffix == ".jsonl":
        frame.to_json(path, orient="records", lines=True)
    else:
        frame.to_csv(path, index=False)
    known = "header = true" if path.suffix == ".csv" else 'format = "jsonl"'
    columns = "\n".join(f'{column} = "{kind}"' for column, kind in kinds.items())
    schema.write_text(f'separator = ","\n{known}\n[columns]\n{columns}')
    return PreprocessOptions(
        inputs=(path,), output=tmp_path / f"{path.suffix[1:]}-data", schema=read_schema(schema), part_bytes=2000
    )


def made(tmp_path: Path, kinds: dict[str, str] = TWO) -> tuple[Manifest, Path]:
    chosen = options(tmp_path, log(), kinds=kinds)
    return preprocess(chosen), chosen.output


def whole(data: Path) -> pd.DataFrame:
    return pd.concat([read(data, split) for split in ("train", "val", "test")], ignore_index=True)


@pytest.mark.parametrize("name", ["log.csv", "log.parquet", "log.jsonl"])
def test_two_labels_and_weights(tmp_path: Path, name: str) -> None:
    frame, chosen = log(), options(tmp_path, log(), name)
    preprocess(chosen)
    manifest, rows = read_manifest(chosen.output), whole(chosen.output)
    verify(manifest, chosen.output)
    assert list(rows) == ["click", "buy", "importance", "cents", "shop"]
    np.testing.assert_array_equal(rows[["click", "buy"]], frame[["click", "buy"]])
    np.testing.assert_array_equal(rows["importance"], frame["importance"].astype(np.float32))
    assert [label.name for label in manifest.labels] == ["click", "buy"]
    assert [label.mean for label in manifest.labels] == pytest.approx(frame[["click", "buy"]].mean())
    assert manifest.weight is not None
    assert manifest.weight.split_means["test"] == pytest.approx(frame["importance"][270:].mean())
    assert manifest.weight.mean == pytest.approx(frame["importance"].mean())


def test_two_labels_in_plain_text(tmp_path: Path) -> None:
    kinds = TWO | {"importance": "ignore"}
    _, with_names = made(tmp_path, kinds)
    plain = options(tmp_path, log(), "log.csv", kinds)
    plain.inputs[0].write_text(log().to_csv(index=False, header=False))  # type: ignore[union-attr]
    assert plain.schema is not None
    plain = replace(plain, schema=replace(plain.schema, header=False, format="text"), output=tmp_path / "plain")
    preprocess(plain)
    pd.testing.assert_frame_equal(whole(plain.output), whole(with_names))


def test_one_label_is_called_label(tmp_path: Path) -> None:
    manifest, data = made(tmp_path, {"click": "label", "shop": "category"})
    assert manifest.label == Label(mean=manifest.label.mean if manifest.label else 0, split_means=manifest.labels[0].split_means)
    assert (manifest.other_labels, manifest.weight, list(whole(data))) == ((), None, ["label", "shop"])


@pytest.mark.parametrize("cell", ["-1", "nan", "", "1e40", "x"])
def test_bad_weights(tmp_path: Path, cell: str) -> None:
    frame = log().astype({"importance": object})
    frame.loc[7, "importance"] = cell
    with pytest.raises(ValueError, match=rf"log.csv:9: importance '{cell}' is not a finite number of at least 0; "):
        preprocess(options(tmp_path, frame))


def test_new_logs_have_all_labels_or_none(tmp_path: Path) -> None:
    _, data = made(tmp_path)
    new = TransformOptions(inputs=(tmp_path / "log.csv",), data=data, output=tmp_path / "new", split="test")
    verify(transform(new), new.output)
    pd.testing.assert_frame_equal(read(new.output, "test"), whole(data))
    log().drop(columns=["click", "buy", "importance"]).to_csv(tmp_path / "log.csv", index=False)
    manifest = transform(replace(new, output=tmp_path / "none"))
    assert (manifest.labels, manifest.weight) == ((), None)
    assert list(read(tmp_path / "none", "test")) == ["cents", "shop"]
    log().drop(columns="buy").to_csv(tmp_path / "log.csv", index=False)
    with pytest.raises(ValueError, match=r"log.csv has the labels label where .* has click, buy; give logs with all of these"):
        transform(replace(new, output=tmp_path / "one"))


def test_npy(tmp_path: Path) -> None:
    manifest, data = made(tmp_path)
    with pytest.raises(ValueError, match=r"has the labels click, buy; torchrec's files hold exactly one"):
        export_npy(manifest, data, tmp_path / "npy")
    (tmp_path / "one").mkdir()
    manifest, data = made(tmp_path / "one", TWO | {"buy": "ignore"})
    export_npy(manifest, data, tmp_path / "npy")
    np.testing.assert_array_equal(np.load(tmp_path / "npy/test_weights.npy")[:, 0], log()["importance"][270:].astype(np.float32))
    assert np.load(tmp_path / "npy/test_labels.npy").shape == (30, 1)


def test_verify_compares_sums(tmp_path: Path) -> None:
    manifest, data = made(tmp_path)
    assert manifest.weight is not None
    means = manifest.weight.split_means | {"test": 0.5}
    with pytest.raises(ValueError, match=r"test holds weights that sum to .*, but their mean is stated as 0.5"):
        verify(replace(manifest, weight=replace(manifest.weight, split_means=means)), data)
    buy = replace(manifest.other_labels[0], split_means=manifest.other_labels[0].split_means | {"val": 0.9})
    with pytest.raises(ValueError, match=r"val holds .* labels of 1, but the mean of buy is stated as 0\.9"):
        verify(replace(manifest, other_labels=(buy,)), data)


def test_weights_do_not_depend_on_parts(tmp_path: Path) -> None:
    chosen = options(tmp_path, log())
    preprocess(chosen)
    workers = replace(chosen, output=tmp_path / "one worker", workers=1)
    preprocess(workers)
    assert files_of(workers.output) == files_of(chosen.output)
    assert read_manifest(workers.output).weight == read_manifest(chosen.output).weight
    schema = pq.read_schema(next((chosen.output / "train").iterdir()))
    assert [str(schema.field(name).type) for name in ("click", "buy", "importance")] == ["int8", "int8", "float"]
