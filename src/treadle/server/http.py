"""The HTTP server: uvicorn, with bulk accept for bursts of connections."""

import asyncio
import functools
import logging
import socket
from typing import Any

import uvicorn
from fastapi import FastAPI

logger = logging.getLogger("treadle")

BACKLOG = 2**16
"""Maximum length of the accept queue. The kernel caps it at net.core.somaxconn, by default 4,096."""


class HttpServer(uvicorn.Server):
    """uvicorn, except that it accepts all waiting connections at once instead of one per loop iteration.

    libuv, and so uvloop, accepts one connection per iteration. When thousands of clients connect at once, an
    iteration takes as long as their requests, the kernel's accept queue stays full, and after some seconds Linux
    resets connections.
    """

    def __init__(self, app: FastAPI, **options: Any) -> None:
        super().__init__(uvicorn.Config(app, access_log=False, backlog=BACKLOG, **options))
        self._service = app.state.service
        self._listeners: list[socket.socket] = []
        self._accepting: set[asyncio.Task[Any]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, register the bulk accept, and log the address."""
        await super().startup(sockets)
        loop = asyncio.get_running_loop()
        for server in self.servers:
            for listening in server.sockets:
                listener = socket.fromfd(listening.fileno(), listening.family, listening.type)
                listener.setblocking(False)
                self._listeners.append(listener)
                loop.add_reader(listener, self._accept_all, listener)
        address, port = self.servers[0].sockets[0].getsockname()[:2]
        host = f"[{address}]" if ":" in address else address
        logger.info("API: http://%s:%d/v1, live page: http://%s:%d/", host, port, host, port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting connections, then shut down."""
        for listener in self._listeners:
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()
        await super().shutdown(sockets)

    def handle_exit(self, *args: Any) -> None:
        """On a signal, refuse new requests."""
        self._service.is_stopping = True
        super().handle_exit(*args)

    def _accept_all(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        make_protocol: Any = self.config.http_protocol_class
        protocol = functools.partial(
            make_protocol, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        while True:
            try:
                connection, _ = listener.accept()
            except (
                OSError
            ):  # none is left, or the limit of open files is reached: the loop's own listener handles that
                return
            connection.setblocking(False)
            task = loop.create_task(loop.connect_accepted_socket(protocol, connection))
            self._accepting.add(task)
            task.add_done_callback(self._accepting.discard)
