"""Requests over HTTP: the Open Inference Protocol for encoded rows, /score for raw ones, /metrics for Prometheus.

    GET  /v2, /v2/health/live, /v2/health/ready, /v2/models/NAME, /v2/models/NAME/ready
    POST /v2/models/NAME/infer      {"inputs": [{"name": "dense", "shape": [1, 13], "datatype": "FP32", "data": [...]}, ...]}
    POST /score                     {"rows": [{"I1": 3, "C1": "2dbcbc4c", ...}, ...]}

A mistake of the client is a 4xx with one line, {"error": "..."}; uvicorn answers what isn't HTTP.
"""

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
import uvicorn
import uvloop
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest

from comera_rec.serving.batching import Batcher, Outputs, Overloaded
from comera_rec.serving.protocol import JSON_LENGTH, describe_model, json_length, read_inputs, write_outputs
from comera_rec.serving.versions import ModelFile, Version
from data_pipeline.errors import UserError

log = logging.getLogger("comera_rec.serving")
Headers = Mapping[str, str]  # with names in lower case
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2)
_READ_LIMITS = 4  # what is read of a body that is too long, in multiples of the limit
_ROWS = (1, 4, 16, 64, 256, 1024, 4096)


class _Response(NamedTuple):
    """An answer."""

    body: bytes
    status: int = 200
    content_type: str = "application/json"
    headers: Mapping[str, str] = {}


Post = Callable[[Headers, bytes], Awaitable[_Response]]


class _Refused(Exception):
    """A request that is answered with a status of its own."""

    def __init__(self, status: int, reason: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(reason)
        self.status, self.headers = status, headers


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
    """The routes of the server, for one model, as an ASGI application; `http` is the server that calls it."""

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
        self._gets: dict[str, Callable[[], _Response]] = {
            "/v2": lambda: _json({"name": "comera-rec", "version": version_of("comera-rec"), "extensions": ["binary_tensor_data"]}),
            "/v2/health/live": lambda: _json({"live": True}),
            "/v2/health/ready": lambda: _json({"ready": True}),
            "/metrics": lambda: _Response(generate_latest(registry), content_type=CONTENT_TYPE_LATEST),
            model: lambda: _json(describe_model(self.file.name, self.file.current.number, self.file.current.model.metadata)),
            f"{model}/ready": lambda: _json({"name": self.file.name, "ready": True}),
        }
        self._posts: dict[str, Post] = {f"{model}/infer": self._infer, "/score": self._score}
        self._routes = dict.fromkeys(self._gets, "GET") | dict.fromkeys(self._posts, "POST")
        self.http = uvicorn.Server(
            uvicorn.Config(
                self,
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=20,
                timeout_graceful_shutdown=5,
            )
        )

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer a request."""
        method, path, start = scope["method"], scope["path"], time.perf_counter()
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        route = path if path in self._routes else "other"
        try:
            body = await self._read(receive)
            if body is None:
                return
            start = time.perf_counter()
            self._check(method, path, headers)
            response = self._gets[path]() if path in self._gets else await self._posts[path](headers, body)
        except asyncio.CancelledError:
            response = _error(503, "the server stops: send the request to another one")
        except Exception as error:
            response = self._refusal(error, route)
        self._requests(route, response.status).inc()
        self._seconds(route).observe(time.perf_counter() - start)
        given = {"Content-Type": response.content_type, "Content-Length": str(len(response.body)), **response.headers}
        encoded = [(name.encode(), value.encode()) for name, value in given.items()]
        with suppress(RuntimeError):  # the client has gone
            await send({"type": "http.response.start", "status": response.status, "headers": encoded})
            await send({"type": "http.response.body", "body": response.body})

    async def _read(self, receive: Receive) -> bytes | None:
        """Return the body of a request, or None if the client has gone.

        A body that is too long is not kept, but read further, as few clients read an answer while they send.
        """
        parts, size, more_body = list[bytes](), 0, True
        while more_body:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            size, more_body = size + len(message["body"]), message["more_body"]
            if size <= self.options.max_body:
                parts.append(message["body"])
            else:
                parts.clear()
                more_body = more_body and size <= _READ_LIMITS * self.options.max_body
        if size > self.options.max_body:
            reason = f"the body has more than {self.options.max_body} bytes: send fewer rows at a time"
            raise _Refused(413, reason, {"Connection": "close"} if message["more_body"] else None)
        return b"".join(parts)

    def _check(self, method: str, path: str, headers: Headers) -> None:
        """Raise _Refused for a request that no route takes."""
        taken, encoding = self._routes.get(path), headers.get("content-encoding", "identity")
        if taken is None:
            here = f"ask for {self.file.name}" if path.startswith("/v2/models/") else f"ask for {', '.join(self._routes)}"
            raise _Refused(404, f"{path} isn't served here: {here}")
        if method != taken and (method, taken) != ("HEAD", "GET"):  # uvicorn leaves out the body
            raise _Refused(405, f"{path} is read by {method}: use {taken}")
        if taken == "POST" and "upgrade" in headers and "upgrade" in headers.get("connection", "").lower():
            # The parser leaves the body to the new protocol.
            reason = f"the request asks for an upgrade to {headers['upgrade']!r}: send it by HTTP/1.1 alone"
            raise _Refused(400, reason, {"Connection": "close"})
        if encoding.lower() != "identity":
            raise _Refused(415, f"the body has the content encoding {encoding!r}: send it as it is")

    def _refusal(self, error: Exception, route: str) -> _Response:
        if isinstance(error, ValueError):
            return _error(400, error)
        if isinstance(error, _Refused):
            return _error(error.status, error, error.headers)
        if isinstance(error, Overloaded):
            reason = f"more than {self.options.max_queue} rows wait: try again, or start more servers"
            return _error(503, reason, {"Retry-After": "1"})
        log.error("a request to %s failed", route, exc_info=error)
        return _error(500, "the server failed; see its log")

    async def _infer(self, headers: Headers, content: bytes) -> _Response:
        version = self.file.current
        length = json_length(headers.get(JSON_LENGTH.lower()), len(content))
        body = _parse(content[:length])
        tensors = read_inputs(body, content[length:], version.model.metadata)
        outputs, number = await self._run(version, tensors)
        answer, binary = write_outputs(body, self.file.name, number, version.model.metadata, outputs)
        response = _json(answer)
        if not binary:
            return response
        length_header = {JSON_LENGTH: str(len(response.body))}
        return _Response(response.body + binary, content_type="application/octet-stream", headers=length_header)

    async def _score(self, headers: Headers, content: bytes) -> _Response:
        body, version = _parse(content), self.file.current
        if version.encoder is None:
            raise _Refused(404, f"/score is unavailable without vocabularies: {version.reason}")
        rows = body.get("rows") if isinstance(body, dict) else None
        if not isinstance(rows, list):
            raise UserError('the body is not an object with a list of rows: give {"rows": [{"I1": 3, ...}, ...]}')
        self._check_rows(len(rows))
        (scores, *_), number = await self._run(version, version.encoder(rows))
        return _json({"scores": scores, "model_version": number})

    def _run(self, version: Version, tensors: Sequence[np.ndarray]) -> Awaitable[Outputs]:
        rows = version.model.check(*tensors)
        self._check_rows(rows)
        return self.batcher.add(version, tensors, rows)

    def _check_rows(self, rows: int) -> None:
        if not rows:
            raise UserError("the request has no rows: give at least one")
        if rows > self.options.max_rows:
            raise _Refused(413, f"the request has {rows} rows: send at most {self.options.max_rows} at a time")

    async def run(self, sock: socket.socket) -> None:
        """Answer requests to a listening socket until `http` is told to exit."""
        watch = asyncio.create_task(self.file.watch(self.options.reload_seconds))
        await self.http.serve([sock])
        watch.cancel()


def _parse(content: bytes) -> Any:
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise UserError(f"the body is not JSON: {error}") from error


def _json(content: Any) -> _Response:
    return _Response(orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY))


def _error(status: int, error: object, headers: Mapping[str, str] | None = None) -> _Response:
    return _Response(orjson.dumps({"error": " ".join(str(error).split())}), status, headers=headers or {})


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket.

    Raises:
        ValueError: if the port is taken, or the host is not an address of this machine.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family, backlog=2048, dualstack_ipv6=family == socket.AF_INET6)
    except socket.gaierror as error:
        raise UserError(f"--host {host} is unknown ({error.strerror}): give a name or address of this machine") from error
    except OSError as error:
        reason = os.strerror(error.errno or 0)  # strerror repeats the address
        raise UserError(f"can't listen on {host}:{port} ({reason}): choose another --port or --host") from error


def serve(options: ServeOptions, tell: Callable[[str], None] = lambda line: None) -> None:
    """Answer requests until interrupted.

    Args:
        options: what to serve.
        tell: called with each message, such as the address.

    Raises:
        ValueError: if the model can't be loaded, the vocabularies don't fit it, or the port is taken.
    """
    with listen(options.host, options.port) as sock:
        server = Server(options)
        version, (host, port, *_) = server.file.current, sock.getsockname()
        if version.encoder is None:
            tell(f"/score is unavailable without vocabularies: {version.reason}")
        tell(f"serving {server.file.name}, version {version.number}, on http://{f'[{host}]' if ':' in host else host}:{port}")
        # uvicorn raises signals again once it has stopped.
        before = {number: signal.signal(number, server.http.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            uvloop.run(server.run(sock))
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
