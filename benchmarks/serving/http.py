"""Requests to `comera serve` over HTTP from wrk, with several numbers of connections: requests per second, and p99.

The model is the demo's in its fast form, trained for a few steps on synthetic logs; server and wrk share the machine. With
`--data`, the log, run and package are kept there for the next time.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from benchmarks.harness.agreement import Disagreement
from benchmarks.harness.environment import FOLDER
from benchmarks.harness.measure import Settings, each_case
from benchmarks.harness.rows import Row
from benchmarks.harness.workload import Sizes
from comera_rec.serving.export import ExportOptions, export_run
from comera_rec.serving.package import ServingModel
from comera_rec.serving.score import flat_rows
from comera_rec.training.config import load_config
from comera_rec.training.trainer import Trainer
from data_pipeline.columns import CATEGORIES, INTEGERS
from data_pipeline.manifest import read_manifest
from data_pipeline.preprocess import PreprocessOptions, preprocess
from data_pipeline.synth import SynthOptions, synth

PROVIDER = "comera serve"
_LOG_ROWS, _SCALE = 100_000, 0.05
_WRK = """
wrk.method, wrk.body = "POST", io.open(os.getenv("BODY")):read("*a")
function done(summary, latency, requests)
  local ms = {}
  for p = 1, 99 do ms[p] = latency:percentile(p) / 1000 end
  local e = summary.errors
  local failed = e.connect + e.read + e.write + e.status + e.timeout
  io.write(string.format('{"requests": %d, "seconds": %f, "failed": %d, "ms": [%s]}\\n',
    summary.requests, summary.duration / 1e6, failed, table.concat(ms, ",")))
end
"""


@dataclass(frozen=True, kw_only=True)
class HttpCase(Sizes):
    """A route, the rows of a request, and the connections, each of which sends one request after the other."""

    route: str
    batch: int
    connections: int


def cases(quick: bool) -> list[HttpCase]:
    connections = (2,) if quick else (1, 2, 4, 8, 16, 32)
    return [
        HttpCase(route=route, batch=batch, connections=n) for route in ("infer", "score") for batch in (1, 100) for n in connections
    ]


def run(settings: Settings) -> Iterator[list[Row]]:
    """Time requests, case by case, after comparing one answer with the model's scores."""
    wrk = shutil.which("wrk")
    if not wrk:
        raise ValueError("wrk is not installed: apt-get install wrk")
    with tempfile.TemporaryDirectory() as work:
        folder = settings.data or Path(work)
        model, data = prepare(folder)
        bodies = {
            (route, batch): _write_body(Path(work), route, batch, folder, data)
            for route in ("infer", "score")
            for batch in (1, 100)
        }
        Path(work, "wrk.lua").write_text(_WRK)
        with _served(model, data) as address:
            for case, case_rows in each_case("serve-http", cases(settings.quick), settings):
                body = bodies[case.route, case.batch]
                url = f"{address}/score" if case.route == "score" else f"{address}/v2/models/model/infer"
                _require_right_scores(url, body, model, data)
                seconds = 1 if settings.quick else max(1, round(settings.plan.seconds))
                command = [wrk, "-t", "1", "-c", case.connections, "-d", f"{seconds}s", "-s", f"{work}/wrk.lua", url]
                done = subprocess.run(list(map(str, command)), env={"BODY": str(body)}, capture_output=True, text=True, check=True)
                measured = json.loads(done.stdout.splitlines()[-1])
                if measured["failed"]:
                    raise Disagreement(f"serve-http: {measured['failed']} of {measured['requests']} requests failed")
                counted = {PROVIDER: {"requests_per_s": measured["requests"] / measured["seconds"], "p99_ms": measured["ms"][-1]}}
                rows = case_rows("run", "ms", {PROVIDER: measured["ms"]}, counted)
                yield [replace(row, samples=measured["requests"]) for row in rows]


def prepare(folder: Path) -> tuple[Path, Path]:
    """Return a package and its data set in the folder, after creating them if they don't exist."""
    log, data, package = folder / "log.txt", folder / "data", folder / "model.pt2"
    if not package.exists():
        synth(SynthOptions(rows=_LOG_ROWS, output=log, scale=_SCALE, overwrite=True))
        preprocess(PreprocessOptions(inputs=(log,), output=data, min_count=1, overwrite=True))
        settings = (f"data.path={data}", f"output={folder}/run", "ranks=none", "training.steps=20", "training.eval_every=0")
        Trainer(load_config(FOLDER.parent / "examples" / "demo.toml", settings)).train()
        export_run(ExportOptions(run=folder / "run", form="fast"), package)
    return package, data


def _write_body(work: Path, route: str, batch: int, folder: Path, data: Path) -> Path:
    """Write the body of a request for the first rows of the log, which are the training split's."""
    body = work / f"{route}-{batch}.json"
    if route == "score":
        names = ("label", *INTEGERS, *CATEGORIES)
        with (folder / "log.txt").open() as log:
            cells = [dict(zip(names, next(log).rstrip("\n").split("\t"), strict=True)) for _ in range(batch)]
        rows = [{name: int(cell) if cell and name[0] == "I" else cell or None for name, cell in row.items()} for row in cells]
        body.write_text(json.dumps({"rows": rows}))
    else:
        flat = _first_rows(data, batch)
        datatypes = {"dense": "FP32", "values": "INT64", "lengths": "INT32"}
        inputs = [
            {"name": name, "datatype": datatypes[name], "shape": list(tensor.shape), "data": tensor.ravel().tolist()}
            for name, tensor in flat._asdict().items()
        ]
        body.write_text(json.dumps({"inputs": inputs}))
    return body


def _first_rows(data: Path, rows: int) -> Any:
    manifest = read_manifest(data)
    return flat_rows(pq.read_table(data / manifest.splits["train"].shards[0].path).slice(0, rows), manifest)


def _require_right_scores(url: str, body: Path, model: Path, data: Path) -> None:
    with urllib.request.urlopen(url, body.read_bytes()) as response:
        answer = json.loads(response.read())
    scores = answer["scores"] if "scores" in answer else answer["outputs"][0]["data"]
    with torch.inference_mode():
        expected = ServingModel(model)(*map(torch.from_numpy, _first_rows(data, len(scores)))).numpy()
    if not np.allclose(scores, expected, atol=1e-5):
        raise Disagreement(f"serve-http: {url} answers with other scores than the model's")


@contextmanager
def _served(model: Path, data: Path) -> Iterator[str]:
    """Run `comera serve`; yield its address."""
    command = [sys.executable, "-m", "comera_rec.cli.main", "serve", "--model", str(model), "--data", str(data), "--port", "0"]
    with subprocess.Popen(command, cwd=FOLDER.parent, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = next((line for line in process.stdout if line.startswith("serving ")), "")
            if not line:
                raise RuntimeError("comera serve did not start; its error is above")
            yield line.split()[-1]
        finally:
            process.terminate()
