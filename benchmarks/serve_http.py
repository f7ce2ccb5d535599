"""One-row requests over HTTP: `comera serve`, a handler of Starlette under uvicorn that calls the same package, and a bare echo.

Load comes from this process, over as many connections as a case says; each sends its next request when it has its answer. Servers
take turns, each in its own process. The echo returns the bodies of requests, under uvicorn too: it bounds any application
beside this load. Rows have milliseconds of a request; `counted` has requests per second and the 99th percentile.
"""

import asyncio
import itertools
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import orjson
import torch
import uvloop
from tqdm import tqdm

from benchmarks.harness.agreement import require_agreement
from benchmarks.harness.environment import FOLDER
from benchmarks.harness.measure import Settings, each_case
from benchmarks.harness.rows import Row
from benchmarks.harness.workload import Given
from benchmarks.serve import QUICK, ServeCase, build, draw_request, package
from comera_rec.serving.package import ServingModel

OURS, STARLETTE, ECHO = "comera serve", "uvicorn, Starlette", "echo"
UVICORN = ("uvicorn", "--log-level=error", "--no-access-log", "--loop=uvloop", "--http=httptools", "--lifespan=off")
COMMANDS = {
    OURS: ("comera_rec", "serve", "--model", "{model}"),
    STARLETTE: (*UVICORN, "--factory", "benchmarks.serve_http:starlette"),
    ECHO: (*UVICORN, "benchmarks.serve_http:echo"),
}
PATH = "/v2/models/model/infer"
TYPES = {"FP32": torch.float32, "INT64": torch.int64}
REQUESTS = 256


def run(settings: Settings) -> Iterator[list[Row]]:
    """Load the servers in turns."""
    sizes = QUICK if settings.quick else ServeCase(batch=1)
    rounds, seconds, connections = (1, 0.5, 4) if settings.quick else (5, 6.0, 32)
    servers = [name for name in COMMANDS if name != STARLETTE or find_spec("starlette")]
    if STARLETTE not in servers:
        tqdm.write(f"serve-http: without {STARLETTE}, which is not installed (pip install starlette)")
    torch.manual_seed(settings.seed)
    for _, rows in each_case("serve-http", [Given(values={"connections": connections, "rows": 1})], settings):
        requests = [draw_request(sizes) for _ in range(REQUESTS)]
        bodies = [_body(*request) for request in requests]
        samples: dict[str, list[float]] = {name: [] for name in servers}
        rates: dict[str, list[float]] = {name: [] for name in servers}
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder, "model.pt2")
            expected = {"output": package(build(sizes), sizes, model, "fast")(*requests[0]).double()}
            for name in servers * rounds:
                with _served(name, model) as port:
                    request = Request(f"http://127.0.0.1:{port}{PATH}", bodies[0], {"Content-Type": "application/json"})
                    answer = orjson.loads(urlopen(request).read())
                    if name != ECHO:
                        require_agreement(expected, {name: {"output": torch.tensor(answer["outputs"][0]["data"])}})
                    times, rate = uvloop.run(_load(port, bodies, connections, seconds))
                samples[name] += times
                rates[name].append(rate)
        p99 = {name: float(np.percentile(times, 99)) for name, times in samples.items()}
        yield rows("run", "ms", samples, {name: {"requests_per_s": median(rates[name]), "p99": p99[name]} for name in p99}, (ECHO,))


def _body(*inputs: torch.Tensor) -> bytes:
    names, types = ("dense", "values", "lengths"), {dtype: name for name, dtype in TYPES.items()}
    tensors = [
        {"name": name, "shape": list(tensor.shape), "datatype": types[tensor.dtype], "data": tensor.flatten().tolist()}
        for name, tensor in zip(names, inputs, strict=True)
    ]
    return orjson.dumps({"inputs": tensors})


@contextmanager
def _served(name: str, model: Path) -> Iterator[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", *(word.format(model=model) for word in COMMANDS[name]), "--port", str(port)]
    server = subprocess.Popen(command, cwd=FOLDER.parent, stdout=subprocess.DEVNULL, env={**os.environ, "MODEL": str(model)})
    try:
        for _ in range(600):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                time.sleep(0.1)
        yield port
    finally:
        server.terminate()
        server.wait()


async def _load(port: int, bodies: list[bytes], connections: int, seconds: float) -> tuple[list[float], float]:
    """Send requests for some seconds; return the milliseconds of each, and how many were answered per second."""
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
    messages = [f"{head}{len(body)}\r\n\r\n".encode() + body for body in bodies]
    times: list[float] = []
    start = time.perf_counter()

    async def client(first: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        turns = itertools.count(first, connections)
        while (sent := time.perf_counter()) < start + seconds:
            writer.write(messages[next(turns) % len(messages)])
            answered = await reader.readuntil(b"\r\n\r\n")
            length = re.match(rb"(?is)HTTP/1.1 200.*content-length: *(\d+)", answered)
            assert length, answered
            await reader.readexactly(int(length[1]))
            times.append(1000 * (time.perf_counter() - sent))
        writer.close()

    await asyncio.gather(*map(client, range(connections)))
    return times, len(times) / (time.perf_counter() - start)


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answer a request with its body."""
    body, more_body = b"", True
    while more_body:
        message = await receive()
        body, more_body = body + message["body"], message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


def starlette() -> Any:
    """Make an application that serves the package $MODEL by the usual means: one call of the model for each request."""
    from starlette.applications import Starlette
    from starlette.responses import Response
    from starlette.routing import Route

    torch.set_num_threads(1)
    model = ServingModel(os.environ["MODEL"])

    async def infer(request: Any) -> Response:
        inputs = orjson.loads(await request.body())["inputs"]
        scores = model(*(torch.tensor(each["data"], dtype=TYPES[each["datatype"]]).view(each["shape"]) for each in inputs))[0]
        output = {"name": "output", "shape": list(scores.shape), "datatype": "FP32", "data": scores.tolist()}
        return Response(orjson.dumps({"outputs": [output]}), media_type="application/json")

    return Starlette(routes=[Route(PATH, infer, methods=["POST"])])
