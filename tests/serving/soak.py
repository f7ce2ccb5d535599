"""A server under load while its model is replaced and bad requests arrive: good requests are answered, bad ones refused."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from comera_rec.serving.package import ServingModel
from data_pipeline.apply import flat_rows
from data_pipeline.manifest import file_sha256, read_manifest

ROWS = 5
CLIENTS = 3


@dataclass
class Outcome:
    """What happened under the load.

    growth_mib: growth of the server's resident memory from a third of the time to the end.
    """

    answered: int = 0
    refused: int = 0
    versions: Counter[str] = field(default_factory=Counter)
    growth_mib: float = 0.0
    wrong: list[str] = field(default_factory=list)


@contextmanager
def served(model: Path, *options: object) -> Iterator[tuple[int, int]]:
    """Run `comera serve`; yield its port and process id once it is ready."""
    command = [sys.executable, "-m", "comera_rec", "serve", "--model", model, "--port", 0, *options]
    process = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            actual = re.search(r"serving .* on http://.*:(\d+)", line)
            if actual:
                yield int(actual[1]), process.pid
                break
        else:
            raise RuntimeError(process.communicate()[1])
    finally:
        process.terminate()
        process.communicate(timeout=30)


def ask(connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
    """Send a request; return the response's status and JSON."""
    connection.request(method, path, body)
    response = connection.getresponse()
    return response.status, json.loads(response.read())


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


def soak(model: Path, other: Path, data: Path, *, seconds: float, swaps: int) -> Outcome:
    """Load a server that starts with `model`, while `other` and `model` replace each other."""
    outcome, stop, lock = Outcome(), threading.Event(), threading.Lock()
    good, tensors = good_rows(data)
    expected = {file_sha256(path)[:12]: ServingModel(path)(*tensors)[0].numpy() for path in (model, other)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt2"
        shutil.copy(model, path)

        def client(connection: http.client.HTTPConnection) -> None:
            body = json.dumps(good).encode()
            while not stop.is_set():
                status, answer = ask(connection, "POST", "/v2/models/model/infer", body)
                with lock:
                    if status != 200:
                        outcome.wrong.append(f"a good request: {status} {answer}")
                    elif not np.allclose(answer["outputs"][0]["data"], expected[answer["model_version"]], atol=1e-6):
                        outcome.wrong.append(f"scores are not those of version {answer['model_version']}")
                    else:
                        outcome.answered += 1
                        outcome.versions[answer["model_version"]] += 1

        def breaker(port: int) -> None:
            while not stop.is_set():
                for method, where, body in bad_requests("model", good):
                    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                    try:
                        status, answer = ask(connection, method, where, body)
                    except (BrokenPipeError, ConnectionResetError):  # refused before the whole body was sent
                        assert len(body or b"") > 1 << 20, f"{method} {where} lost its connection"
                        continue
                    finally:
                        connection.close()
                    error = answer.get("error", "")
                    with lock:
                        if not 400 <= status < 500 or not error or "\n" in error:
                            outcome.wrong.append(f"{method} {where} {(body or b'')[:40]!r}: {status} {answer}")
                        outcome.refused += 1
                    if stop.wait(0.005):
                        return

        with served(path, "--data", data, "--reload-seconds", 0.1) as (port, pid):
            connections = [http.client.HTTPConnection("127.0.0.1", port, timeout=60) for _ in range(CLIENTS)]
            threads = [threading.Thread(target=client, args=(connection,)) for connection in connections]
            threads.append(threading.Thread(target=breaker, args=(port,)))
            for thread in threads:
                thread.start()
            warm = 0.0
            for swap in range(swaps):
                time.sleep(seconds / swaps)
                warm = warm or (resident_mib(pid) if swap >= swaps // 3 else 0.0)
                beside = path.with_suffix(".new")
                shutil.copy((other, model)[swap % 2], beside)
                beside.replace(path)
            time.sleep(1)
            stop.set()
            for thread in threads:
                thread.join()
            for connection in connections:
                connection.close()
            outcome.growth_mib = resident_mib(pid) - warm
    return outcome


def resident_mib(pid: int) -> float:
    """Resident memory of a process in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) / 1024  # type: ignore[index]
