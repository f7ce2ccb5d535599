"""Requests over HTTP: the Open Inference Protocol for encoded rows, /score for raw ones, /metrics for Prometheus.

    GET  /v2, /v2/health/live, /v2/health/ready, /v2/models/NAME, /v2/models/NAME/ready
    POST /v2/models/NAME/infer      {"inputs": [{"name": "dense", "shape": [1, 13], "datatype": "FP32", "data": [...]}, ...]}
    POST /score                     {"rows": [{"I1": 3, "C1": "2dbcbc4c", ...}, ...]}

A mistake of the client is a 4xx with one line, {"error": "..."}.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import uvloop
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest

from comera_rec.serving.batching import Batcher, Outputs, Overloaded
from comera_rec.serving.connections import HttpServer, Request, Response, listen
from comera_rec.serving.protocol import JSON_LENGTH, describe_model, json_length, read_inputs, write_outputs
from comera_rec.serving.versions import ModelFile, Version
from data_pipeline.errors import UserError

log = logging.getLogger("comera_rec.serving")
Reply = Callable[[Any], None]  # takes a Response, content for JSON, or an exception
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2)
_ROWS = (1, 4, 16, 64, 256, 1024, 4096)


class _Refused(Exception):
    """A request that is answered with a status of its own."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of the server; the command checks their ranges.

    Args:
        model: MODEL.pt2; its stem is the model's name.
        data: folder of the vocabularies for /score; None takes the one that the model names.
        host, port: address to listen on; port 0 takes a free one.
        threads: number of threads that the model may use.
        max_batch: largest number of rows in a model call that answers several requests.
        max_queue: largest number of rows that wait; further requests are answered 503.
        max_rows: largest number of rows in a request.
        max_body: largest number of bytes in a request.
        reload_seconds: seconds between checks of the file.
    """

    model: Path
    data: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    threads: int = 1
    max_batch: int = 256
    max_queue: int = 16_384
    max_rows: int = 4096
    max_body: int = 8 << 20
    reload_seconds: float = 1.0


class Server:
    """The routes of the server, for one model."""

    def __init__(self, options: ServeOptions) -> None:
        self.options = options
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        requests = Counter("comera_requests", "Requests by route and status.", ["route", "status"], registry=registry)
        seconds = Histogram("comera_request_seconds", "Time of a request.", ["route"], buckets=_SECONDS, registry=registry)
        rows = Histogram("comera_batch_rows", "Rows in a call of the model.", buckets=_ROWS, registry=registry)
        versions = Counter("comera_versions", "Versions of the file, loaded or refused.", ["result"], registry=registry)
        self._requests, self._seconds = cache(requests.labels), cache(seconds.labels)
        self.file = ModelFile(
            options.model, data=options.data, threads=options.threads, observe=lambda result: versions.labels(result).inc()
        )
        self.batcher = Batcher(max_rows=options.max_batch, max_queue=options.max_queue, observe=rows.observe)
        model = f"/v2/models/{self.file.name}"
        self._gets: dict[str, Callable[[], Any]] = {
            "/v2": lambda: {"name": "comera-rec", "version": version_of("comera-rec"), "extensions": ["binary_tensor_data"]},
            "/v2/health/live": lambda: {"live": True},
            "/v2/health/ready": lambda: {"ready": True},
            "/metrics": lambda: Response(generate_latest(registry), content_type=CONTENT_TYPE_LATEST),
            model: lambda: describe_model(self.file.name, self.file.current.number, self.file.current.metadata),
            f"{model}/ready": lambda: {"name": self.file.name, "ready": True},
        }
        self._posts: dict[str, Callable[[Request, Reply], None]] = {f"{model}/infer": self._infer, "/score": self._score}
        self._routes = dict.fromkeys(self._gets, "GET") | dict.fromkeys(self._posts, "POST")

    def handle(self, request: Request, respond: Callable[[Response], None]) -> None:
        """Answer a request, now or once the model has run."""
        start, route = time.perf_counter(), request.path if request.path in self._routes else "other"

        def reply(answer: Any) -> None:
            response = self._response(answer, route)
            self._requests(route, response.status).inc()
            self._seconds(route).observe(time.perf_counter() - start)
            respond(response)

        try:
            self._check(request)
            if request.method == "GET":
                reply(self._gets[request.path]())
            else:
                self._posts[request.path](request, reply)
        except Exception as error:
            reply(error)

    def _check(self, request: Request) -> None:
        """Raise _Refused for a request that no route takes."""
        method, encoding = self._routes.get(request.path), request.headers.get("content-encoding", "identity")
        if method is None:
            here = f"ask for {self.file.name}" if request.path.startswith("/v2/models/") else f"ask for {', '.join(self._routes)}"
            raise _Refused(404, f"{request.path} isn't served here: {here}")
        if request.method != method:
            raise _Refused(405, f"{request.path} is read by {request.method}: use {method}")
        if request.is_too_long:
            raise _Refused(413, f"the body has more than {self.options.max_body} bytes: send fewer rows at a time")
        if encoding != "identity":
            raise _Refused(415, f"the body has the content encoding {encoding!r}: send it as it is")

    def _response(self, answer: Any, route: str) -> Response:
        if isinstance(answer, Response):
            return answer
        if not isinstance(answer, Exception):
            return _json(answer)
        if isinstance(answer, ValueError):
            return _error(400, answer)
        if isinstance(answer, _Refused):
            return _error(answer.status, answer)
        if isinstance(answer, Overloaded):
            error = f"more than {self.options.max_queue} rows wait: try again, or start more servers"
            return _error(503, error, {"Retry-After": "1"})
        log.error("a request to %s failed", route, exc_info=answer)
        return _error(500, "the server failed; see its log")

    def _infer(self, request: Request, reply: Reply) -> None:
        version = self.file.current
        length = json_length(request.headers.get(JSON_LENGTH.lower()), len(request.body))
        body = _parse(request.body[:length])
        tensors = read_inputs(body, request.body[length:], version.metadata)

        def write(outputs: list[np.ndarray]) -> Response:
            content, binary = write_outputs(body, self.file.name, version.number, version.metadata, outputs)
            response = _json(content)
            if not binary:
                return response
            headers = {JSON_LENGTH: str(len(response.body))}
            return Response(response.body + binary, content_type="application/octet-stream", headers=headers)

        self._run(version, tensors, write, reply)

    def _score(self, request: Request, reply: Reply) -> None:
        body, version = _parse(request.body), self.file.current
        if version.encoder is None:
            raise _Refused(404, f"/score is unavailable without vocabularies: {version.reason}")
        rows = body.get("rows") if isinstance(body, dict) else None
        if not isinstance(rows, list):
            raise UserError('the body is not an object with a list of rows: give {"rows": [{"I1": 3, ...}, ...]}')
        self._check_rows(len(rows))

        self._run(version, version.encoder(rows), lambda outputs: {"scores": outputs[0], "model_version": version.number}, reply)

    def _run(self, version: Version, tensors: Sequence[np.ndarray], write: Callable[[list[np.ndarray]], Any], reply: Reply) -> None:
        rows = version.model.check(*tensors)
        self._check_rows(rows)

        def done(outputs: Outputs) -> None:
            reply(outputs if isinstance(outputs, Exception) else write(outputs))

        self.batcher.add(version.model, tensors, rows, done)

    def _check_rows(self, rows: int) -> None:
        if not rows:
            raise UserError("the request has no rows: give at least one")
        if rows > self.options.max_rows:
            raise _Refused(413, f"the request has {rows} rows: send at most {self.options.max_rows} at a time")

    async def run(self, sock: socket.socket, stop: asyncio.Event) -> None:
        """Answer requests to a listening socket until `stop` is set."""
        watch = asyncio.create_task(self.file.watch(self.options.reload_seconds))
        unavailable = _error(503, "the server stops: send the request to another one")
        await HttpServer(self.handle, self.options.max_body, unavailable).serve(sock, stop)
        watch.cancel()


def _parse(content: bytes) -> Any:
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise UserError(f"the body is not JSON: {error}") from error


def _json(content: Any) -> Response:
    return Response(orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY))


def _error(status: int, error: object, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps({"error": " ".join(str(error).split())}), status, headers=headers or {})


def serve(options: ServeOptions, tell: Callable[[str], None] = lambda line: None) -> None:
    """Answer requests until interrupted.

    Args:
        options: what to serve.
        tell: called with each message, such as the address.

    Raises:
        ValueError: if the model can't be loaded, the vocabularies don't fit it, or the port is taken.
    """

    async def run() -> None:
        stop = asyncio.Event()
        for name in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(name, stop.set)
        await server.run(sock, stop)

    with listen(options.host, options.port) as sock:
        server = Server(options)
        version, (host, port, *_) = server.file.current, sock.getsockname()
        if version.encoder is None:
            tell(f"/score is unavailable without vocabularies: {version.reason}")
        tell(f"serving {server.file.name}, version {version.number}, on http://{f'[{host}]' if ':' in host else host}:{port}")
        uvloop.run(run())
