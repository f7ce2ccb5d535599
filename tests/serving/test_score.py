"""Scores of whole data sets; the commands of docs/guides/serving.md run."""

import gzip
import json
import multiprocessing
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from page_commands import run_commands
from refusals import refuse

from comera_rec.serving.package import ServingModel
from comera_rec.serving.score import ScoreOptions, _executor, _load, flat_rows, score
from data_pipeline.manifest import read_manifest
from data_pipeline.options import PreprocessOptions
from data_pipeline.preprocess import preprocess
from data_pipeline.transform import TransformOptions, transform


def options(model: Path, scored: Path, output: Path, **others: Any) -> ScoreOptions:
    return ScoreOptions(**({"model": model, "inputs": (scored,), "output": output, "workers": 1} | others))


def scores(*arguments: Path, **others: Any) -> pa.Table:
    scored, table = score(options(*arguments, **others)), pq.read_table(arguments[2])
    assert scored == len(table)
    return table


def expected(model: Path, data: Path, split: str) -> np.ndarray:
    """Compute a split's scores directly by the model."""
    manifest = read_manifest(data)
    table = pa.concat_tables([pq.read_table(data / shard.path) for shard in manifest.splits[split].shards])
    with torch.inference_mode():
        actual: np.ndarray = ServingModel(model)(*map(torch.from_numpy, flat_rows(table, manifest)))[0].numpy()
    return actual


def test_a_log_is_scored_as_its_data_set(model: Path, data: Path, tmp_path: Path) -> None:
    """The log is read in parts, on several processes, gzipped and without labels."""
    log = data.parent / "train.txt"
    selected = np.concatenate([expected(model, data, split) for split in ("train", "val", "test")])
    table = scores(model, log, tmp_path / "scores", part_bytes=300_000, workers=2)
    assert table.schema.names == ["line", "score", "label"]
    assert table["line"].to_pylist() == list(range(1, 4001))
    np.testing.assert_allclose(table["score"].to_numpy(), selected, atol=1e-6)
    unlabeled = b"".join(line.partition(b"\t")[2] for line in log.read_bytes().splitlines(keepends=True)[:100])
    (tmp_path / "log.gz").write_bytes(gzip.compress(unlabeled))
    table = scores(model, tmp_path / "log.gz", tmp_path / "others")
    assert table.schema.names == ["line", "score"]
    np.testing.assert_allclose(table["score"].to_numpy(), selected[:100], atol=1e-6)


def test_resumed_after_a_malformed_line(model: Path, data: Path, tmp_path: Path) -> None:
    """The line is named; once it may be dropped, finished parts are kept, and line numbers skip it."""
    lines = (data.parent / "train.txt").read_bytes().splitlines(keepends=True)[:300]
    log, messages = tmp_path / "log", list[str]()
    log.write_bytes(b"".join([*lines[:250], b"bad\n", *lines[250:]]))
    stopped = options(model, log, tmp_path / "scores.parquet", part_bytes=10_000)
    refuse("log:251: 1 columns where 40 are expected; fix the log", score, stopped)
    assert not stopped.output.exists()
    score(replace(stopped, max_bad_rows=1), messages.append)
    assert "resuming an interrupted run" in messages[0]
    table = pq.read_table(stopped.output)
    assert table["line"].to_pylist() == [*range(1, 251), *range(252, 302)]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_model_that_is_replaced_during_a_run(model: Path) -> None:
    refuse("model.pt2, or the weights beside it, changed while logs were scored: run the command again", _load, model, ("another",))


def _use_worker(function: Callable[..., object], argument: object) -> None:
    with _executor(2) as executor:
        executor.submit(function, argument).result()


def _outlive_parent(path: Path) -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(0.5)
    path.touch()


def _die_before_worker(path: Path) -> None:
    multiprocessing.get_context = lambda _: multiprocessing.context.ForkContext()  # type: ignore[assignment]  # imports nothing
    _use_worker(_outlive_parent, path)


def test_processes_die(tmp_path: Path) -> None:
    """A worker that dies ends the run in a line, and workers end with a parent that is killed."""
    refuse("a worker died, probably out of memory: lower `workers`, and run the command again to resume", _use_worker, os._exit, 1)
    parent = multiprocessing.get_context("forkserver").Process(target=_die_before_worker, args=(tmp_path / "outlived",))
    parent.start()
    parent.join()
    assert parent.exitcode == -signal.SIGKILL
    time.sleep(0.8)
    assert not list(tmp_path.iterdir())


def test_new_days(model: Path, data: Path, tmp_path: Path) -> None:
    """A data set that `transform` made is scored with the model; one with other vocabularies is refused."""
    log = tmp_path / "log"
    log.write_bytes(b"".join((data.parent / "train.txt").read_bytes().splitlines(keepends=True)[:500]))
    transform(TransformOptions(inputs=(log,), data=data, output=tmp_path / "new", split="test"))
    table = scores(model, tmp_path / "new", tmp_path / "scores")
    np.testing.assert_allclose(table["score"].to_numpy(), expected(model, data, "train")[:500], atol=1e-6)
    preprocess(PreprocessOptions(inputs=(log,), output=tmp_path / "other"))
    refused = r"other has other vocabularies than the model was trained with \(in C1, .*\): give the model's data set"
    other, no = tmp_path / "other", tmp_path / "no"
    for chosen in (options(model, other, no), options(model, log, no, data=other)):
        refuse(refused, score, chosen)
    empty = options(model, tmp_path / "new", no, split="train")
    refuse("split train of .*new is empty; choose another `split`", score, empty)
    refuse("`split` is 'all'; choose one of train, val, test", lambda: score(replace(empty, split="all")))
    refuse(r"`output` .*manifest.json and `input` .* overlap", options, model, data, data / "manifest.json", overwrite=True)


def test_commands_run(trained: Path, model: Path, data: Path, tmp_path: Path) -> None:
    if not shutil.which("curl"):
        pytest.skip("curl is not installed")
    (tmp_path / "runs").mkdir()
    for name, target in {"runs/compressed": trained, "data": data, "today.txt": data.parent / "train.txt"}.items():
        (tmp_path / name).symlink_to(target)
    (tmp_path / "model.pt2").write_bytes(model.read_bytes())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    export = "comera export --checkpoint runs/compressed --output model.pt2"  # as the fixture did
    printed = run_commands(Path(__file__).parents[2] / "docs/guides/serving.md", tmp_path, port=port, without=export)
    assert len(pq.read_table(tmp_path / "scores.parquet")) == 4000
    answers = re.findall(r'\{"scores":.*?\}', printed)
    assert len(answers) == 1
    assert 0 < json.loads(answers[0])["scores"][0] < 1
    assert '"platform":"torch_aoti"' in printed
    assert "comera_requests_total" in printed
    assert (tmp_path / "today" / "manifest.json").exists()
