"""Connections of the server: how they are accepted, how long they may wait for their client, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette

from data_pipeline.errors import UserError

_CLIENT_SECONDS = 20  # that a client may take to send a request
_DRAIN_SECONDS = 5  # that requests may take once the server stops; as much again if clients haven't sent all of them


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
    return sock


class HttpServer(uvicorn.Server):
    """Uvicorn, which also closes connections whose client sends too slowly, and answers what was sent before it stops."""

    def __init__(self, app: Starlette) -> None:
        options: dict[str, Any] = {"log_level": "warning", "access_log": False, "timeout_graceful_shutdown": _DRAIN_SECONDS}
        super().__init__(uvicorn.Config(app, http="httptools", ws="none", **options))
        self._waiting: dict[Any, tuple[Any, float]] = {}  # connection: its last request, and since when it waits for its client

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:  # every second
            self._close_slow()
        return await super().on_tick(counter)

    def _close_slow(self) -> None:
        now, before = time.monotonic(), self._waiting
        connections: set[Any] = self.server_state.connections
        self._waiting = {}
        for connection in filter(_waits_for_client, connections):
            request, since = before.get(connection, (None, now))
            if request is not connection.cycle:
                since = now
            self._waiting[connection] = connection.cycle, since
            if now - since > _CLIENT_SECONDS:
                connection.transport.close()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer the requests that clients have sent. Uvicorn would reset connections that it hasn't accepted or read yet."""
        self.server_state.default_headers.append((b"connection", b"close"))
        connected = [client for sock in sockets or () for client in _accept_all(sock)]
        for closed in (*self.servers, *(sockets or ())):  # at once, before others connect
            closed.close()
        for client in connected:
            await asyncio.get_running_loop().connect_accepted_socket(self._protocol, client)
        end = time.monotonic() + _DRAIN_SECONDS
        while time.monotonic() < end:
            await asyncio.sleep(0.1)
            await asyncio.sleep(0)  # reads what has arrived while the model ran
            if all(map(_waits_for_client, self.server_state.connections)):
                break
        await super().shutdown(sockets)

    def _protocol(self) -> asyncio.Protocol:
        protocol: Any = self.config.http_protocol_class
        return protocol(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)


def _accept_all(sock: socket.socket) -> Iterator[socket.socket]:
    """Accept the clients that have connected to a listening socket."""
    sock.setblocking(False)
    with contextlib.suppress(OSError):  # none is left, or no more files can be opened
        while True:
            yield sock.accept()[0]


def _waits_for_client(connection: Any) -> bool:
    """Return whether no request has arrived that is whole and unanswered."""
    request = connection.cycle
    return request is None or request.response_complete or request.more_body
