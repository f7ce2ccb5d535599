"""HTTP/1.1 connections: parsed by httptools, answered in order, closed if their client is slow, drained when the server stops."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import httptools

from data_pipeline.errors import UserError

_CLIENT_SECONDS = 20.0  # that a client may take to send a request
_DRAIN_SECONDS = 5.0  # that requests may take once the server stops; as much again if clients haven't sent all of them
_HEAD_BYTES = 64 << 10  # largest head of a request
_READ_LIMITS = 4  # what is read of a body that is too long, in multiples of the limit: few clients read an answer while sending
_PIPELINED = 16  # requests of a connection that may wait


@dataclass(frozen=True)
class Request:
    """A request, with the names of its headers in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    is_too_long: bool = False


@dataclass(frozen=True)
class Response:
    """An answer."""

    body: bytes
    status: int = 200
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


Handler = Callable[[Request, Callable[[Response], None]], None]


class HttpServer:
    """Connections of a listening socket.

    Args:
        handler: called with each request and a function that takes its answer, now or later, in the event loop.
        max_body: largest number of bytes in a body; of a longer one, the handler sees only that it is too long.
        unavailable: answer to a request that isn't whole when the server stops.
    """

    def __init__(self, handler: Handler, max_body: int, unavailable: Response) -> None:
        self.handler, self.max_body, self.unavailable = handler, max_body, unavailable
        self.connections: set[_Connection] = set()
        self.is_stopping = False

    async def serve(self, sock: socket.socket, stop: asyncio.Event) -> None:
        """Answer requests until `stop` is set; then those that clients have sent."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Connection(self), sock=sock, backlog=2048)
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), timeout=_CLIENT_SECONDS / 20)
            for connection in list(self.connections):
                connection.close_if_slow()
        self.is_stopping = True
        waiting = list(_accept_all(sock))  # clients that closing the socket would reset
        server.close()
        for client in waiting:
            await loop.connect_accepted_socket(lambda: _Connection(self), client)
        end = time.monotonic() + _DRAIN_SECONDS
        while time.monotonic() < end:
            await asyncio.sleep(0.1)
            await asyncio.sleep(0)  # reads what has arrived while the model ran
            if not any(connection.is_busy or connection.has_begun for connection in self.connections):
                break
        for connection in list(self.connections):
            connection.finish()
        end = time.monotonic() + _DRAIN_SECONDS
        while self.connections and time.monotonic() < end:
            await asyncio.sleep(0.05)


class _Connection(asyncio.Protocol):
    def __init__(self, server: HttpServer) -> None:
        self._server, self._parser = server, httptools.HttpRequestParser(self)
        self._requests: deque[tuple[Request, bool]] = deque()  # whether the connection stays open after it
        self._is_writable, self._is_ending = True, False  # ending: what follows the queued requests is ignored
        self._since = time.monotonic()  # that the client is waited for
        self.is_busy = False
        self.has_begun = False  # a request that isn't whole
        self._begin()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._server.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.connections.discard(self)

    def pause_writing(self) -> None:
        self._is_writable = False

    def resume_writing(self) -> None:
        self._is_writable = True
        self._next()

    def data_received(self, data: bytes) -> None:
        self._head += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserUpgrade, httptools.HttpParserError):
            self._refuse(HTTPStatus.BAD_REQUEST)
        else:
            if self._head > _HEAD_BYTES and self.has_begun and not self._has_head:
                self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def _begin(self) -> None:
        self._path, self._headers, self._body = b"", dict[str, str](), list[bytes]()
        self._read = self._head = 0
        self._has_head = False

    def on_message_begin(self) -> None:
        self.has_begun = True
        if not self.is_busy:
            self._since = time.monotonic()

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._has_head = True
        if self._headers.get("expect", "").lower() == "100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._read += len(body)
        if self._read <= self._server.max_body:
            self._body.append(body)
        elif self._read > _READ_LIMITS * self._server.max_body and not self._transport.is_closing():
            self._take(keep_alive=False)
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        self._take(keep_alive=self._parser.should_keep_alive())

    def _take(self, keep_alive: bool) -> None:
        """Queue the request that has arrived."""
        path = self._path.partition(b"?")[0].decode("latin-1")
        is_too_long = self._read > self._server.max_body
        body = b"" if is_too_long else b"".join(self._body)
        request = Request(self._parser.get_method().decode(), path, self._headers, body, is_too_long)
        self.has_begun = False
        self._begin()
        self._requests.append((request, keep_alive))
        if len(self._requests) > _PIPELINED:
            self._transport.pause_reading()
        self._next()

    def _next(self) -> None:
        if self._requests and not self.is_busy and self._is_writable and not self._transport.is_closing():
            self.is_busy = True
            request, keep_alive = self._requests.popleft()
            self._server.handler(request, lambda response: self._answer(response, keep_alive))

    def _answer(self, response: Response, keep_alive: bool) -> None:
        if self._transport.is_closing():
            return
        keep_alive = keep_alive and not self._server.is_stopping and not (self._is_ending and not self._requests)
        lines = [f"HTTP/1.1 {response.status} {HTTPStatus(response.status).phrase}", f"content-type: {response.content_type}"]
        lines += [f"content-length: {len(response.body)}", *(f"{name}: {value}" for name, value in response.headers.items())]
        lines += ["\r\n"] if keep_alive else ["connection: close", "\r\n"]
        self._transport.write("\r\n".join(lines).encode("latin-1") + response.body)
        self.is_busy, self._since = False, time.monotonic()
        if not keep_alive:
            self._transport.close()
        elif self._requests:
            self._next()
            if len(self._requests) == _PIPELINED:
                self._transport.resume_reading()

    def _refuse(self, status: HTTPStatus) -> None:
        if self.is_busy or self._requests:
            self._is_ending = True
            self._transport.pause_reading()
        elif not self._transport.is_closing():
            self._answer(Response(f'{{"error": "{status.phrase}"}}'.encode(), status), keep_alive=False)

    def close_if_slow(self) -> None:
        """Close the connection if its client has been waited for too long."""
        if not self.is_busy and time.monotonic() - self._since > _CLIENT_SECONDS:
            self._transport.close()

    def finish(self) -> None:
        """Close the connection; a request that isn't whole is answered."""
        if self.has_begun and not self.is_busy:
            self._answer(self._server.unavailable, keep_alive=False)
        elif not self.is_busy:
            self._transport.close()


def _accept_all(sock: socket.socket) -> Iterator[socket.socket]:
    """Accept the clients that have connected to a listening socket."""
    with contextlib.suppress(OSError):  # none is left, or no more files can be opened
        while True:
            client, _ = sock.accept()
            client.setblocking(False)
            yield client


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket.

    Raises:
        ValueError: if the port is taken, or the host is not an address of this machine.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UserError(f"--host {host} is unknown ({error.strerror}): give a name or address of this machine") from error
    sock = socket.socket(family, kind)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise UserError(f"can't listen on {host}:{port} ({error.strerror}): choose another --port or --host") from error
    sock.setblocking(False)
    return sock
