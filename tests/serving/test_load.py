"""Requests for a server, good ones and bad ones with one mistake each; and both while models are replaced."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow.parquet as pq
import torch

from comera_rec.serving.package import ServingModel
from comera_rec.serving.score import flat_rows
from data_pipeline.manifest import file_sha256, read_manifest

ROWS = 5


def infer_body(dense: list, values: list, lengths: list) -> dict[str, Any]:
    """Build an inference request."""
    return {
        "inputs": [
            {"name": "dense", "datatype": "FP32", "shape": [len(dense), len(dense[0]) if dense else 0], "data": dense},
            {"name": "values", "datatype": "INT64", "shape": [len(values)], "data": values},
            {"name": "lengths", "datatype": "INT32", "shape": [len(lengths)], "data": lengths},
        ]
    }


def good_rows(data: Path) -> tuple[dict[str, Any], tuple[torch.Tensor, ...]]:
    """Build an inference request of some test rows; also return the rows as tensors."""
    manifest = read_manifest(data)
    table = pq.read_table(data / manifest.splits["test"].shards[0].path).slice(0, ROWS)
    flat = flat_rows(table, manifest)
    return infer_body(*(part.tolist() for part in flat)), tuple(map(torch.from_numpy, flat))


def bad_requests(name: str, good: dict[str, Any]) -> list[tuple[str, str, bytes | None]]:
    """Requests with one mistake each: method, path and body."""
    infer = f"/v2/models/{name}/infer"

    def changed(number: int, **changes: Any) -> bytes:
        inputs = [dict(tensor) for tensor in good["inputs"]]
        inputs[number] |= changes
        return json.dumps({"inputs": inputs}).encode()

    dense, values, lengths = (tensor["data"] for tensor in good["inputs"])
    wrapped = [lengths[0] + (1 << 32), *lengths[1:]]  # as 32-bit integers these are the lengths
    deep = b"[" * 1000 + b"]" * 1000

    def with_deep(content: Any) -> bytes:
        return json.dumps(content).replace('"DEEP"', deep.decode()).encode()

    return [
        ("POST", infer, b"{"),
        ("POST", infer, b"[]"),
        ("POST", infer, b'{"inputs": []}'),
        ("POST", infer, changed(0, data=[row[:-1] for row in dense])),
        ("POST", infer, changed(0, data=[[None, *row[1:]] for row in dense])),
        ("POST", infer, changed(0, data=[["1", *row[1:]] for row in dense])),
        ("POST", infer, changed(0, data=[[1e39, *row[1:]] for row in dense])),
        ("POST", infer, changed(1, data=[1 << 40, *values[1:]])),
        ("POST", infer, changed(1, data=[-1, *values[1:]])),
        ("POST", infer, changed(1, data=[0.5, *values[1:]])),
        ("POST", infer, changed(1, datatype="FP32")),
        ("POST", infer, changed(2, shape=[1])),
        ("POST", infer, changed(2, shape="all")),
        ("POST", infer, changed(2, data=wrapped)),
        ("POST", infer, changed(2, data=wrapped, datatype="INT64")),
        ("POST", infer, changed(0, name=[1])),
        ("POST", infer, json.dumps(good | {"outputs": 5}).encode()),
        ("POST", infer, json.dumps(good | {"outputs": [{"name": "logits"}]}).encode()),
        *(("POST", infer, with_deep(good | {"id": bad})) for bad in ("DEEP", 7, [])),
        *(("POST", infer, with_deep(good | {"outputs": [bad]})) for bad in ("DEEP", {"name": "DEEP"})),
        *(("POST", infer, with_deep(good | {"parameters": bad})) for bad in ("DEEP", {"binary_data_output": "DEEP"})),
        *(("POST", infer, with_deep({"inputs": [bad]})) for bad in ("DEEP", {"name": "DEEP"})),
        *(
            ("POST", infer, with_deep(json.loads(changed(0, **{key: "DEEP"}))))
            for key in ("datatype", "shape", "data", "parameters")
        ),
        ("POST", infer, changed(1, shape=[0, 1 << 63], data=[])),
        ("POST", infer, changed(1, shape=[1] * 99, data=[1])),
        ("POST", infer, changed(1, data=[1 << 63, -1, *values[2:]])),
        ("POST", infer, changed(0, data=dense).replace(b"[[", b"[[NaN, ")),
        ("POST", infer, b"[" * 100_000),
        ("POST", infer, b" " * (9 << 20)),
        ("POST", f"{infer}?", b"\xff"),
        ("POST", "/v2/models/other/infer", json.dumps(good).encode()),
        ("POST", "/score", b'{"rows": [{}]}'),
        ("POST", "/score", b'{"rows": [5]}'),
        ("POST", "/score", b'{"rows": []}'),
        ("POST", "/score", b'{"rows": 1}'),
        *(("POST", "/score", with_deep({"rows": bad})) for bad in (["DEEP"], "DEEP", [{"I1": "DEEP"}])),
        ("POST", "/score", json.dumps({"rows": [{"I1": 1 << 400}]}).encode()),
        ("POST", "/score", b'{"rows": [{"C1": "\\ud800"}]}'),
        ("POST", "/score", json.dumps({"rows": [{}] * 5000}).encode()),
        ("GET", "/score", None),
        ("GET", "/nowhere", None),
    ]


def error_of(answer: httpx.Response) -> str:
    (error,) = answer.json().values()
    return error


def refuse_mistakes(client: httpx.Client, good: dict[str, Any], step: int = 1) -> None:
    """Check that every bad request, or one in `step`, is answered in one line."""
    for method, path, body in bad_requests("model", good)[::step]:
        if len(body or b"") < 1 << 20:
            answer = client.request(method, path, content=body)
            assert 400 <= answer.status_code < 500, f"{method} {path} {(body or b'')[:60]!r}: {answer} {answer.content}"
            assert error_of(answer)
            assert "\n" not in error_of(answer)


@contextlib.contextmanager
def serving_process(*options: object, signal_number: int = signal.SIGTERM) -> Iterator[tuple[httpx.Client, int]]:
    """Run `comera serve`; yield a client and the process id once it is ready. A signal ends it, without an error."""
    command = [sys.executable, "-m", "comera_rec", "serve", "--port", 0, *options]
    process = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        ready = next(filter(None, (re.search(r"serving .* on (http://.*:\d+)", line) for line in process.stdout)), None)
        assert ready, process.communicate()[1]
        with httpx.Client(base_url=ready[1], timeout=60) as client:
            yield client, process.pid
    finally:
        process.send_signal(signal_number)
        shown = process.communicate(timeout=30)[1]
    assert (process.returncode, "Traceback" in shown) == (0, False), shown


def resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) / 1024


def test_load_with_new_versions(package: Callable[[str], Path], data: Path, tmp_path: Path) -> None:
    """Three clients get the scores of the version that answers, while the model is replaced and bad requests arrive."""
    (good, tensors), models, path = good_rows(data), [package("portable"), package("fast")], tmp_path / "model.pt2"
    expected = {file_sha256(model)[:12]: ServingModel(model)(*tensors)[0].numpy() for model in models}
    shutil.copy(models[0], path)
    stop, versions, growth = threading.Event(), list[str](), list[float]()

    def ask(client: httpx.Client) -> None:
        while not stop.is_set():
            answer = client.post("/v2/models/model/infer", json=good).json()
            np.testing.assert_allclose(answer["outputs"][0]["data"], expected[answer["model_version"]], atol=1e-6)
            versions.append(answer["model_version"])

    with (
        serving_process("--model", path, "--data", data, "--reload-seconds", 0.1) as (client, pid),
        ThreadPoolExecutor(3) as pool,
        contextlib.ExitStack() as at_end,
    ):
        at_end.callback(stop.set)
        refuse_mistakes(client, good)
        asking = [pool.submit(ask, client) for _ in range(3)]
        for model in (*models[::-1], models[1]):
            refuse_mistakes(client, good, step=5)
            growth.append(resident_mib(pid))
            shutil.copy(model, tmp_path / "new")
            (tmp_path / "new").replace(path)
            time.sleep(1)
        growth.append(resident_mib(pid))
    for asked in asking:
        asked.result()
    assert set(versions) == expected.keys()
    assert len(versions) > 20
    assert growth[-1] - growth[1] < 60, growth
