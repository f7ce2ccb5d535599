"""Requests over HTTP: the Open Inference Protocol for encoded rows, /score for raw ones, /metrics for Prometheus.

    GET  /v2, /v2/health/live, /v2/health/ready, /v2/models/NAME, /v2/models/NAME/ready
    POST /v2/models/NAME/infer      {"inputs": [{"name": "dense", "shape": [1, 13], "datatype": "FP32", "data": [...]}, ...]}
    POST /score                     {"rows": [{"I1": 3, "C1": "2dbcbc4c", ...}, ...]}

/v2/models/NAME/versions/VERSION is for clients that accept no other version. A mistake of the client is a 4xx with one line,
{"error": "..."}.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import orjson
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from comera_rec.serving.batching import Batcher, Overloaded
from comera_rec.serving.connections import HttpServer, listen
from comera_rec.serving.protocol import JSON_LENGTH, describe_model, json_length, read_inputs, write_outputs
from comera_rec.serving.versions import ModelFile, Version
from data_pipeline.encoder import Flat
from data_pipeline.errors import UserError

log = logging.getLogger("comera_rec.serving")
Handler = Callable[[Request], Awaitable[Any]]
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2)
_READ_LIMITS = 4  # what is read of a body that is too long, in multiples of the limit
_ROWS = (1, 4, 16, 64, 256, 1024, 4096)


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of the server.

    Args:
        model: MODEL.pt2; its stem is the model's name.
        data: folder of the vocabularies for /score; None takes the one that the model names.
        host, port: address to listen on; port 0 takes a free one.
        threads: number of threads that the model may use.
        max_batch: largest number of rows in a model call that answers several requests.
        max_wait_ms: milliseconds that a request waits for others.
        max_queue: largest number of rows that wait; further requests are answered 503.
        max_rows: largest number of rows in a request.
        max_body: largest number of bytes in a request.
        reload_seconds: seconds between checks of the file.

    Raises:
        ValueError: for values out of range.
    """

    model: Path
    data: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    threads: int = 1
    max_batch: int = 256
    max_wait_ms: float = 0.0
    max_queue: int = 16_384
    max_rows: int = 4096
    max_body: int = 8 << 20
    reload_seconds: float = 1.0

    def __post_init__(self) -> None:
        for name, minimum in {
            "threads": 1,
            "max_batch": 1,
            "max_wait_ms": 0,
            "max_queue": 1,
            "max_rows": 1,
            "max_body": 1,
            "reload_seconds": 0.01,
        }.items():
            if not getattr(self, name) >= minimum:
                raise UserError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least {minimum}")
        if not 0 <= self.port < 1 << 16:
            raise UserError(f"--port is {self.port}; it must be 0 to 65535")


class Server:
    """The routes of the server, for one model."""

    def __init__(self, options: ServeOptions) -> None:
        self.options = options
        registry = self._registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._requests = Counter("comera_requests", "Requests by route and status.", ["route", "status"], registry=registry)
        self._seconds = Histogram("comera_request_seconds", "Time of a request.", ["route"], buckets=_SECONDS, registry=registry)
        self._rows = Histogram("comera_batch_rows", "Rows in a call of the model.", buckets=_ROWS, registry=registry)
        self._versions = Counter("comera_versions", "Versions of the file, loaded or refused.", ["result"], registry=registry)
        self.file = ModelFile(
            options.model, data=options.data, threads=options.threads, observe=lambda result: self._versions.labels(result).inc()
        )
        self.batcher = Batcher(
            max_rows=options.max_batch, max_wait=options.max_wait_ms / 1000, max_queue=options.max_queue, observe=self._rows.observe
        )
        gets: dict[str, Handler] = {
            "/v2": self._server,
            "/v2/health/live": self._live,
            "/v2/health/ready": self._ready,
            "/metrics": self._metrics,
        }
        posts: dict[str, Handler] = {"/score": self._score}
        for model in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
            gets |= {model: self._model, f"{model}/ready": self._model_ready}
            posts[f"{model}/infer"] = self._infer
        routes = [
            Route(path, self._answered(path, handler), methods=[method])
            for method, handlers in (("GET", gets), ("POST", posts))
            for path, handler in handlers.items()
        ]
        self.app = Starlette(routes=routes, lifespan=self._lifespan, exception_handlers={HTTPException: _refused})

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self.batcher.run()), asyncio.create_task(self.file.watch(self.options.reload_seconds))]
        yield
        for task in tasks:
            task.cancel()

    def _answered(self, route: str, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        """Wrap a handler: its errors become answers, and its requests are counted."""
        seconds = self._seconds.labels(route)

        async def handle(request: Request) -> Response:
            start = time.perf_counter()
            try:
                answer = await handler(request)
                response = answer if isinstance(answer, Response) else _json(answer)
            except ValueError as error:
                response = _error(400, error)
            except HTTPException as error:
                response = _error(error.status_code, error.detail)
            except asyncio.CancelledError:  # the server stops, and this request has had its time
                response = _error(503, "the server stops: send the request to another one")
            except Overloaded:
                response = _error(503, f"more than {self.options.max_queue} rows wait: try again, or start more servers")
                response.headers["Retry-After"] = "1"
            except ClientDisconnect:
                response = _error(400, "the client disconnected")
            except Exception:
                log.exception("a request to %s failed", route)
                response = _error(500, "the server failed; see its log")
            self._requests.labels(route, response.status_code).inc()
            seconds.observe(time.perf_counter() - start)
            return response

        return handle

    async def _server(self, request: Request) -> dict[str, Any]:
        return {"name": "comera-rec", "version": version_of("comera-rec"), "extensions": ["binary_tensor_data"]}

    async def _live(self, request: Request) -> dict[str, Any]:
        return {"live": True}

    async def _ready(self, request: Request) -> dict[str, Any]:
        return {"ready": True}

    async def _model(self, request: Request) -> dict[str, Any]:
        version = self._version(request)
        return describe_model(self.file.name, version.number, version.metadata)

    async def _model_ready(self, request: Request) -> dict[str, Any]:
        self._version(request)
        return {"name": self.file.name, "ready": True}

    async def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    async def _infer(self, request: Request) -> Response:
        version, content = self._version(request), await self._content(request)
        length = json_length(request.headers.get(JSON_LENGTH), len(content))
        body = _parse(content[:length])
        rows = read_inputs(body, content[length:], version.metadata)
        self._check_rows(len(rows.dense))
        scores = await self.batcher.score(version.model, rows)
        answer, binary = write_outputs(body, self.file.name, version.number, scores)
        response = _json(answer)
        if not binary:
            return response
        headers = {JSON_LENGTH: str(len(response.body))}
        return Response(bytes(response.body) + binary, headers=headers, media_type="application/octet-stream")

    async def _score(self, request: Request) -> dict[str, Any]:
        body, version = _parse(await self._content(request)), self.file.current
        if version.encoder is None:
            raise HTTPException(404, f"/score is unavailable without vocabularies: {version.reason}")
        rows = body.get("rows") if isinstance(body, dict) else None
        if not isinstance(rows, list):
            raise UserError('the body is not an object with a list of rows: give {"rows": [{"I1": 3, ...}, ...]}')
        self._check_rows(len(rows))
        flat: Flat = version.encoder(rows)
        return {"scores": await self.batcher.score(version.model, flat), "model_version": version.number}

    async def _content(self, request: Request) -> bytes:
        """Read the body; reading continues for a while past the limit, because few clients read an answer while sending."""
        limit = self.options.max_body
        encoding = request.headers.get("content-encoding", "identity")
        if encoding not in ("identity", "gzip", "deflate"):
            raise HTTPException(415, f"the body has the content encoding {encoding!r}: send gzip, deflate or identity")
        received, read = bytearray(), 0
        async for chunk in request.stream():
            read += len(chunk)
            if read <= limit:
                received += chunk
            elif read > _READ_LIMITS * limit:
                break
        content = bytes(received)
        if encoding != "identity" and read <= limit:
            content = _decompress(content, encoding, limit)
        if max(read, len(content)) > limit:
            raise HTTPException(413, f"the body has more than {limit} bytes: send fewer rows at a time")
        return content

    def _version(self, request: Request) -> Version:
        """Return the version that a path names, or the present one."""
        version, name, number = self.file.current, request.path_params["name"], request.path_params.get("version")
        if name != self.file.name:
            raise HTTPException(404, f"there is no model {name!r} here: ask for {self.file.name}")
        if number not in (None, version.number):
            raise HTTPException(404, f"there is no version {number!r} of {name} here: ask for {version.number}")
        return version

    def _check_rows(self, rows: int) -> None:
        if not rows:
            raise UserError("the request has no rows: give at least one")
        if rows > self.options.max_rows:
            raise HTTPException(413, f"the request has {rows} rows: send at most {self.options.max_rows} at a time")


def _parse(content: bytes) -> Any:
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise UserError(f"the body is not JSON: {error}") from error


def _decompress(content: bytes, encoding: str, limit: int) -> bytes:
    """Return what a gzip or zlib stream holds; at most one byte more than the limit."""
    stream = zlib.decompressobj(wbits=47)  # either format
    try:
        decompressed = stream.decompress(content, limit + 1)
    except zlib.error as error:
        raise UserError(f"the body is not {encoding}: {error}") from error
    if len(decompressed) <= limit and (stream.unused_data or not stream.eof):
        raise UserError(f"the body is not one whole stream of {encoding}: compress it at once")
    return decompressed


def _json(content: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY), status, media_type="application/json")


def _error(status: int, error: object) -> Response:
    return _json({"error": " ".join(str(error).split())}, status)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for HTTPException only"
    return _error(error.status_code, f"{request.method} {request.url.path}: {error.detail}")


def serve(options: ServeOptions, tell: Callable[[str], None] = lambda line: None) -> None:
    """Answer requests until interrupted.

    Args:
        options: what to serve.
        tell: called with each message, such as the address.

    Raises:
        ValueError: if the model can't be loaded, the vocabularies don't fit it, or the port is taken.
    """
    sock = listen(options.host, options.port)
    with sock:
        server = Server(options)
        version, (host, port, *_) = server.file.current, sock.getsockname()
        if version.encoder is None:
            tell(f"/score is unavailable without vocabularies: {version.reason}")
        tell(f"serving {server.file.name}, version {version.number}, on http://{f'[{host}]' if ':' in host else host}:{port}")
        HttpServer(server.app).run(sockets=[sock])
