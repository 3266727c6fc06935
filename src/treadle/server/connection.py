"""One HTTP connection: uvicorn's protocol, with limits on what a client may send and on how long it may take.

uvicorn limits neither the headers nor the time in which a request arrives or an answer is read.
"""

import asyncio
import json
import logging
from asyncio.events import TimerHandle
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from treadle.server.responses import error_body

logger = logging.getLogger("treadle")

MAX_HEADER_BYTES = 2**15
"""Limit on the request line and the headers together."""
MAX_HEADERS = 128
"""Limit on the number of headers."""
MAX_CONNECTIONS = 16_384
"""Limit on open connections."""
MAX_PIPELINED = 16
"""Limit on the requests that wait on a connection for the answer to an earlier one."""
RECEIVE_TIMEOUT_S = 60.0
"""Time in which a request, headers and body, must arrive, from its first byte; or the first byte of the first one."""
STALLED_READER_S = 60.0
"""After this time without enough progress, a client that does not read its answer is disconnected."""
MIN_READ_BYTES_PER_S = 1024
"""What counts as progress."""


class LimitedConnection(HttpToolsProtocol):
    """A connection with limits. The class attributes may be replaced in tests."""

    max_connections: ClassVar[int] = MAX_CONNECTIONS
    receive_timeout_s: ClassVar[float] = RECEIVE_TIMEOUT_S
    stalled_reader_s: ClassVar[float] = STALLED_READER_S

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._receive_timer: TimerHandle | None = None
        self._reader_timer: TimerHandle | None = None
        self._num_unsent = 0
        self._is_in_headers = False
        self._num_raw_bytes = 0  # received since the start of the headers
        self._num_header_bytes = 0  # parsed

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuse the connection if there are too many, or wait for its first request."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._refuse(503, f"the server has {self.max_connections} open connections; try again later")
            return
        self._start_receiving()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        self._stop_receiving()
        self._stop_watching_reader()
        super().connection_lost(exc)

    # Receiving a request

    def data_received(self, data: bytes) -> None:
        """Parse data; refuse it if the headers grow too large."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self._is_in_headers and not self.transport.is_closing():
            self._num_raw_bytes += len(data)
            self._check_headers()
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self._receive_timer is None and not self.transport.is_closing():
            self._start_receiving()  # blank lines between requests begin none

    def on_message_begin(self) -> None:
        """Start the clock of a request."""
        super().on_message_begin()
        self._is_in_headers = True
        self._num_raw_bytes = self._num_header_bytes = 0
        self._start_receiving()

    def on_url(self, url: bytes) -> None:
        """Take a part of the URL."""
        super().on_url(url)
        self._num_header_bytes += len(url)
        self._check_headers()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        super().on_header(name, value)
        self._num_header_bytes += len(name) + len(value)
        self._check_headers()

    def on_headers_complete(self) -> None:
        """Hand the request to the application, unless it was refused."""
        self._is_in_headers = False
        if not self.transport.is_closing():
            super().on_headers_complete()
        if len(self.pipeline) > MAX_PIPELINED:
            self.transport.abort()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body, unless the request was refused."""
        if self.cycle is not None and not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Stop the clock of the request."""
        self._stop_receiving()
        if self.cycle is not None and not self.transport.is_closing():
            super().on_message_complete()

    def _check_headers(self) -> None:
        if self.transport.is_closing():
            return
        if max(self._num_raw_bytes, self._num_header_bytes) > MAX_HEADER_BYTES:
            self._refuse(431, f"the headers exceed {MAX_HEADER_BYTES} bytes")
        elif len(self.headers) > MAX_HEADERS:
            self._refuse(431, f"there are more than {MAX_HEADERS} headers")

    def _start_receiving(self) -> None:
        self._stop_receiving()
        self._receive_timer = self.loop.call_later(self.receive_timeout_s, self._receive_late)

    def _stop_receiving(self) -> None:
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None

    def _receive_late(self) -> None:
        if self.transport.is_closing():
            return
        if self.flow.read_paused:  # the server is the one that waits: for the answer to the previous request
            self._start_receiving()
        elif self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()
        else:
            self._refuse(408, f"the request did not arrive within {self.receive_timeout_s:g} s")

    def _refuse(self, status: int, message: str) -> None:
        """Answer in OpenAI's format, and close."""
        body = json.dumps(error_body(message, "invalid_request_error", code=status)).encode()
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self._close()

    def _close(self) -> None:
        """Close when what is written has been read, and in any case after a while."""
        self.transport.close()
        self.loop.call_later(self.stalled_reader_s, self.transport.abort)

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection without requests."""
        if not self.transport.is_closing():
            self._close()

    # Sending an answer

    def on_response_complete(self) -> None:
        """Start the next request of the pipeline, or wait for one."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._close()

    def pause_writing(self) -> None:
        """Watch a client that does not read."""
        super().pause_writing()
        self._num_unsent = self.transport.get_write_buffer_size()
        self._reader_timer = self.loop.call_later(self.stalled_reader_s, self._check_reader)

    def resume_writing(self) -> None:
        """Stop watching."""
        super().resume_writing()
        self._stop_watching_reader()

    def _check_reader(self) -> None:
        left = self.transport.get_write_buffer_size()
        if self._num_unsent - left < MIN_READ_BYTES_PER_S * self.stalled_reader_s:
            logger.info("a client that does not read its answer was disconnected")
            self.transport.abort()
            return
        self._num_unsent = left
        self._reader_timer = self.loop.call_later(self.stalled_reader_s, self._check_reader)

    def _stop_watching_reader(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None
