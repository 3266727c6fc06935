"""The HTTP server: uvicorn, with bulk accept for bursts of connections, limits, and an orderly end."""

import asyncio
import functools
import logging
import socket
from typing import Any

import uvicorn
from fastapi import FastAPI

from treadle.server.connection import LimitedConnection

logger = logging.getLogger("treadle")

LINGER_S = 3.0
"""Time that clients have to read the end of their answers at shutdown."""

BACKLOG = 2**16
"""Maximum length of the accept queue. The kernel caps it at net.core.somaxconn, by default 4,096."""


class HttpServer(uvicorn.Server):
    """uvicorn, except for how it accepts connections and how it ends.

    It accepts all waiting connections at once. libuv, and so uvloop, accepts one connection per iteration. When
    thousands of clients connect at once, an iteration takes as long as their requests, the kernel's accept queue
    stays full, and after some seconds Linux resets connections.

    At shutdown it keeps listening while requests finish, so that /health reports it. What is unfinished after the
    grace ends with an error, in its own format. A second Ctrl-C ends the grace.

    Args:
        app: as `create_app` makes it.
        grace_s: seconds that unfinished requests have to finish at shutdown.
        options: for uvicorn.Config.
    """

    def __init__(self, app: FastAPI, *, grace_s: float = 10.0, **options: Any) -> None:
        config = uvicorn.Config(
            app,
            http=LimitedConnection,
            ws="none",
            lifespan="on",  # "auto" goes on without an engine if the application cannot start
            access_log=False,
            backlog=BACKLOG,
            timeout_graceful_shutdown=1,
            **options,
        )
        super().__init__(config)
        self._service = app.state.service
        self._grace_s = grace_s
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
        """Finish what can be finished in time, end the rest with errors, then close."""
        loop = asyncio.get_running_loop()
        engine = self._service.engine
        if engine.num_unfinished_requests and not self.force_exit:
            logger.info(
                "shutting down: waiting up to %g s for %d unfinished requests; press Ctrl-C again to stop now",
                self._grace_s,
                engine.num_unfinished_requests,
            )
        deadline = loop.time() + self._grace_s
        while (
            engine.num_unfinished_requests and engine.error is None and not self.force_exit and loop.time() < deadline
        ):
            await asyncio.sleep(0.02)
        if engine.num_unfinished_requests and engine.error is None:
            logger.warning("%d requests were ended before they had finished", engine.num_unfinished_requests)
        await self._service.shut_down()
        for listener in self._listeners:
            loop.remove_reader(listener)
            listener.close()
        await self._let_clients_read(LINGER_S)
        self.force_exit = False  # all is done; uvicorn would only skip the application's own end
        await super().shutdown(sockets)

    async def _let_clients_read(self, timeout_s: float) -> None:
        """Wait until every answer has been read; disconnect the clients that take too long."""
        loop = asyncio.get_running_loop()
        connections = self.server_state.connections
        deadline = loop.time() + timeout_s
        while True:
            for connection in list(connections):
                connection.shutdown()
            if not connections or loop.time() >= deadline:
                break
            await asyncio.sleep(0.02)
        for connection in list(connections):
            connection.transport.abort()

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
