"""One-row requests over HTTP: `comera serve`, a handler of Starlette under uvicorn that calls the same package, and a bare echo.

Load comes from this process, over as many connections as a case says; each sends its next request when it has its answer. Servers
take turns, each in its own process. The echo returns the bodies of requests, under uvicorn too: it bounds any application
beside this load. Rows have milliseconds of a request; `counted` has requests per second and the 99th percentile.
"""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import orjson
import torch
import uvicorn
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
COMMANDS = {
    OURS: ("comera_rec", "serve", "--port", "{port}", "--model", "{model}"),
    STARLETTE: ("benchmarks.serve_http", "starlette", "{port}", "{model}"),
    ECHO: ("benchmarks.serve_http", "echo", "{port}", "{model}"),
}
PATH = "/v2/models/model/infer"
REQUESTS = 256


def run(settings: Settings) -> Iterator[list[Row]]:
    """Load the servers in turns."""
    sizes = QUICK if settings.quick else ServeCase(batch=1)
    rounds, seconds, connections = (1, 0.5, 4) if settings.quick else (5, 6.0, 32)
    whole = Given(values={"connections": connections, "rows": 1})
    torch.manual_seed(settings.seed)
    requests = [draw_request(sizes) for _ in range(REQUESTS)]
    servers = [name for name in COMMANDS if name != STARLETTE or find_spec("starlette")]
    if STARLETTE not in servers:
        tqdm.write(f"serve-http: without {STARLETTE}, which is not installed (pip install starlette)")
    for _, rows in each_case("serve-http", [whole], settings):
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder, "model.pt2")
            expected = package(build(sizes), sizes, model, "fast")(*requests[0])
            bodies = [_body(*request) for request in requests]
            samples: dict[str, list[float]] = {name: [] for name in servers}
            rates: dict[str, list[float]] = {name: [] for name in servers}
            for _ in range(rounds):
                for name in servers:
                    with _served(name, model) as port:
                        answer = _post(port, bodies[0])
                        if name != ECHO:
                            scores = torch.tensor(answer["outputs"][0]["data"])
                            require_agreement({"output": expected.double()}, {name: {"output": scores}})
                        times, rate = uvloop.run(_load(port, bodies, connections, seconds))
                        samples[name] += times
                        rates[name].append(rate)
        counted = {
            name: {"requests_per_s": median(rates[name]), "p99": float(np.percentile(times, 99))} for name, times in samples.items()
        }
        yield rows("run", "ms", samples, counted, (ECHO,))


def _body(*inputs: torch.Tensor) -> bytes:
    names, types = ("dense", "values", "lengths"), {torch.float32: "FP32", torch.int64: "INT64"}
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
    command = [sys.executable, "-m", *(word.format(port=port, model=model) for word in COMMANDS[name])]
    server = subprocess.Popen(command, cwd=FOLDER.parent, stdout=subprocess.DEVNULL)
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


def _post(port: int, body: bytes) -> Any:
    connection = HTTPConnection("127.0.0.1", port)
    connection.request("POST", PATH, body, {"Content-Type": "application/json"})
    answer = orjson.loads(connection.getresponse().read())
    connection.close()
    return answer


async def _load(port: int, bodies: list[bytes], connections: int, seconds: float) -> tuple[list[float], float]:
    """Send requests for some seconds; return the milliseconds of each, and how many were answered per second."""
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
    messages = [f"{head}{len(body)}\r\n\r\n".encode() + body for body in bodies]
    times: list[float] = []
    start = time.perf_counter()

    async def client(first: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        turn = first
        while (sent := time.perf_counter()) < start + seconds:
            writer.write(messages[turn % len(messages)])
            answered = await reader.readuntil(b"\r\n\r\n")
            assert answered.startswith(b"HTTP/1.1 200"), answered
            length = re.search(rb"(?i)content-length: *(\d+)", answered)
            assert length
            await reader.readexactly(int(length[1]))
            times.append(1000 * (time.perf_counter() - sent))
            turn += connections
        writer.close()

    await asyncio.gather(*map(client, range(connections)))
    return times, len(times) / (time.perf_counter() - start)


async def _echo(scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]) -> None:
    """Answer a request with its body."""
    body, more_body = b"", True
    while more_body:
        message = await receive()
        body, more_body = body + message["body"], message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


def _starlette(port: int, path: str) -> None:
    """Serve a package by the usual means: JSON in, one call of the model for each request, JSON out."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    torch.set_num_threads(1)
    model, types = ServingModel(path), {"FP32": torch.float32, "INT64": torch.int64}

    async def infer(request: Request) -> Response:
        inputs = orjson.loads(await request.body())["inputs"]
        tensors = [torch.tensor(each["data"], dtype=types[each["datatype"]]).view(each["shape"]) for each in inputs]
        scores = model(*tensors)[0]
        output = {"name": "output", "shape": list(scores.shape), "datatype": "FP32", "data": scores.tolist()}
        return Response(orjson.dumps({"outputs": [output]}), media_type="application/json")

    _run(Starlette(routes=[Route(PATH, infer, methods=["POST"])]), port)


def _run(app: Any, port: int) -> None:
    uvicorn.run(app, port=port, log_level="error", access_log=False, loop="uvloop", http="httptools", lifespan="off")


if __name__ == "__main__":
    if sys.argv[1] == "echo":
        _run(_echo, int(sys.argv[2]))
    else:
        _starlette(int(sys.argv[2]), sys.argv[3])
