"""Middleware before every endpoint: the host that is asked for, the API key, and limits on the body.

Plain ASGI, so that streams pass through unchanged.
"""

import ipaddress
import json
import re
import secrets
import socket
from collections.abc import Iterable, Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from treadle.core.metadata import is_text
from treadle.server.responses import error_body

MAX_ITEMS = 300_000
"""Limit on the commas, colons and opening brackets of a body: parsing it holds up all other requests."""
MAX_ESCAPES = 500_000
"""Limit on the backslashes of a body, for the same reason."""
MAX_HELD_BYTES = 2**28
SMALL_BODY_BYTES = 2**16
"""A body of this size is received even while large ones of others fill the limit."""

OPEN_PATHS = frozenset({"/health", "/"})
OPEN_FOLDER = "/page/"
"""The page is static and contains no data; it asks the user for the key and sends it with its requests."""


_HIGH, _LOW = rb"\\u[dD][89abAB]..", rb"\\u[dD][c-fC-F].."
_LONE_SURROGATE = re.compile(rb"%s(?!%s)|(?<!%s)%s|\xed[\xa0-\xbf]" % (_HIGH, _LOW, _HIGH, _LOW), re.DOTALL)
"""Halves of a pair without the other half, escaped or as bytes, where no escaped backslash stands before a 'u'."""

_MAX_SEARCHED_BYTES = 2**14
_MAX_SHOWN_DEPTH = 4


def has_lone_surrogate(body: bytes) -> bool:
    """Whether JSON text holds half a surrogate pair, which is no character and cannot be encoded."""
    if not any(start in body for start in (b"\\ud", b"\\uD", b"\xed")):
        return False
    return _LONE_SURROGATE.search(body.replace(b"\\\\", b"__")) is not None


def _field_with_surrogate(body: bytes) -> str | None:
    """The place of a lone surrogate in a JSON body, such as "messages.0.content".

    None if the body is not JSON, or too long to be searched without delaying other requests.
    """
    if len(body) > _MAX_SEARCHED_BYTES:
        return None
    try:
        path = _path_to_surrogate(json.loads(body))
    except (ValueError, RecursionError):
        return None
    return ".".join((path or [])[:_MAX_SHOWN_DEPTH]) or None


def _path_to_surrogate(value: Any) -> list[str] | None:
    """Names and places that lead to the first text that is not Unicode, or to the object with such a name."""
    if isinstance(value, str):
        return None if is_text(value) else []
    entries: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, (dict, list)):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in entries:
        if isinstance(key, str) and not is_text(key):
            return []
        path = _path_to_surrogate(inner)
        if path is not None:
            return [str(key), *path]
    return None


async def _refuse(send: Send, status: int, message: str, kind: str, field: str | None = None) -> None:
    body = json.dumps(error_body(message, kind, field, code=status)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)


class RequireKey:
    """Requires `Authorization: Bearer <key>`, except on OPEN_PATHS and below OPEN_FOLDER."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: D102
        if scope["type"] == "http" and not _is_open(scope["path"]):
            # As bytes: Headers decodes as latin-1, where parts of UTF-8 characters are blanks.
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            scheme, _, key = given.partition(b" ")
            if scheme.lower() != b"bearer" or not secrets.compare_digest(key.strip(b" \t"), self._key):
                await _refuse(send, 401, "send the server's key as 'Authorization: Bearer …'", "authentication_error")
                return
        await self._app(scope, receive, send)


LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


def hosts_for(address: str) -> list[str]:
    """The host names that clients may ask for by default, if the server listens on `address`.

    On a loopback address these are its names: a web page from elsewhere whose name was made to resolve to this
    machine (DNS rebinding) asks for that name. On other addresses the server's names are unknown: any is allowed.
    """
    try:
        found = {ipaddress.ip_address(info[4][0]) for info in socket.getaddrinfo(address, None)}
    except (OSError, ValueError):
        return ["*"]
    mapped = {ip.ipv4_mapped or ip if isinstance(ip, ipaddress.IPv6Address) else ip for ip in found}
    is_loopback = all(ip.is_loopback for ip in mapped)
    if not is_loopback:
        return ["*"]
    own = f"[{address}]" if ":" in address else address
    return [own, *(name for name in LOOPBACK_NAMES if name != own)]


class CheckHost:
    """Refuses requests whose Host header names none of `allowed`.

    Args:
        app: the application.
        allowed: names without port; "*" for any, "*.example.com" for all below example.com.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        self._app = app
        self._allowed = {name.lower() for name in allowed if not name.startswith("*.")}
        self._endings = tuple(name[1:].lower() for name in allowed if name.startswith("*."))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: D102
        if scope["type"] == "http" and "*" not in self._allowed:
            given = Headers(scope=scope).get("host", "")
            host = _PORT.sub("", given).lower().removesuffix(".")
            if host not in self._allowed and not (self._endings and host.endswith(self._endings)):
                text = f"the Host header {given[:100]!r} is none of this server's names; see --allowed-hosts"
                await _refuse(send, 403, text, "invalid_request_error", "host")
                return
        await self._app(scope, receive, send)


_PORT = re.compile(r":\d*$")


class CheckBody:
    """Refuses bodies that are too large, have too many parts, or hold text that is not Unicode.

    Errors are in OpenAI's format; FastAPI's own limit answers in plain text.

    Args:
        app: the application.
        max_bytes: limit on one body, with or without Content-Length.
        max_held_bytes: limit on all bodies that are being received, together.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_held_bytes = max(max_held_bytes, max_bytes)
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: D102
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdigit() and int(length) > self._max_bytes:
            await self._too_large(send)
            return
        message: Message | None = await self._receive(receive, send)
        if message is None:
            return

        async def replay() -> Message:
            nonlocal message
            given, message = message, None
            return given or await receive()

        await self._app(scope, replay, send)

    async def _receive(self, receive: Receive, send: Send) -> Message | None:
        """The whole body as one message, or the client's end; None if it was refused."""
        parts: list[bytes] = []
        num_bytes = 0
        try:
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    return message
                part = message.get("body", b"")
                parts.append(part)
                num_bytes += len(part)
                self._held_bytes += len(part)
                if num_bytes > self._max_bytes:
                    await self._too_large(send)
                    return None
                if self._held_bytes > self._max_held_bytes and num_bytes > SMALL_BODY_BYTES:
                    text = "the server is receiving too many large requests; try again later"
                    await _refuse(send, 503, text, "overloaded_error")
                    return None
                if not message.get("more_body", False):
                    break
        finally:
            self._held_bytes -= num_bytes
        body = b"".join(parts)
        if b"\0" in body[:4] or body.startswith((b"\xff\xfe", b"\xfe\xff")):  # json reads UTF-16 and UTF-32 too
            await _refuse(send, 400, "the body must be JSON in UTF-8", "invalid_request_error")
            return None
        num_items = sum(map(body.count, (b",", b":", b"[", b"{")))
        if num_items > MAX_ITEMS:
            text = f"the body holds {num_items} commas, colons and opening brackets; at most {MAX_ITEMS} are read"
            await _refuse(send, 400, text, "invalid_request_error")
            return None
        if (num_escapes := body.count(b"\\")) > MAX_ESCAPES:
            text = f"the body holds {num_escapes} backslashes; at most {MAX_ESCAPES} are read. Send text as UTF-8"
            await _refuse(send, 400, text, "invalid_request_error")
            return None
        if has_lone_surrogate(body):
            field = _field_with_surrogate(body)
            text = "holds half a surrogate pair (\\ud800 to \\udfff), which is no character"
            await _refuse(send, 400, f"{field or 'the body'}: {text}", "invalid_request_error", field)
            return None
        return {"type": "http.request", "body": body, "more_body": False}

    async def _too_large(self, send: Send) -> None:
        message = f"the request body exceeds {self._max_bytes} bytes"
        await _refuse(send, 413, message, "invalid_request_error")
