"""Middleware before every endpoint: the limit on body size, and the API key.

Plain ASGI, so that streams pass through unchanged.
"""

import json
import re
import secrets

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from treadle.server.responses import error_body

OPEN_PATHS = frozenset({"/health", "/"})
OPEN_FOLDER = "/page/"
"""The page is static and contains no data; it asks the user for the key and sends it with its requests."""


_SURROGATES = re.compile(
    rb"\\\\"  # an escaped backslash, which may stand before a 'u'
    rb"|\\u[dD][89abAB]..\\u[dD][c-fC-F]..|(\\u[dD][89a-fA-F]..|\xed[\xa0-\xbf])",
    re.DOTALL,
)
"""Pairs of surrogates, and (as group 1) halves without the other half, escaped or as bytes."""


def has_lone_surrogate(body: bytes) -> bool:
    """Whether JSON text holds half a surrogate pair, which is no character and cannot be encoded."""
    return any(match.group(1) is not None for match in _SURROGATES.finditer(body))


_MAX_SEARCHED_BYTES = 2**18
_MAX_SEARCHED_DEPTH = 4


def _field_with_surrogate(body: bytes) -> str | None:
    """The place of a lone surrogate in a JSON body, such as "messages.0.content".

    None if the body is not JSON, or too long to be searched without delaying other requests.
    """
    if len(body) > _MAX_SEARCHED_BYTES:
        return None
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    path: list[str] = []
    while isinstance(value, (dict, list)) and len(path) < _MAX_SEARCHED_DEPTH:
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in entries:
            if isinstance(key, str) and has_lone_surrogate(json.dumps(key).encode()):
                return ".".join(path) or None
            if has_lone_surrogate(json.dumps(inner).encode()):
                path.append(str(key))
                value = inner
                break
        else:
            return None
    return ".".join(path) or None


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
            scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not secrets.compare_digest(
                key.strip().encode("latin-1"),
                self._key,  # Headers decodes as latin-1 whatever bytes there are
            ):
                await _refuse(send, 401, "send the server's key as 'Authorization: Bearer …'", "authentication_error")
                return
        await self._app(scope, receive, send)


class CheckBody:
    """Refuses bodies over `max_bytes`, with or without Content-Length, and text that is no Unicode.

    Errors are in OpenAI's format; FastAPI's own limit answers in plain text.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: D102
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdigit() and int(length) > self._max_bytes:
            await self._too_large(send)
            return
        body, message = b"", None
        while True:
            message = await receive()
            if message["type"] != "http.request":
                break
            body += message.get("body", b"")
            if len(body) > self._max_bytes:
                await self._too_large(send)
                return
            if not message.get("more_body", False):
                message = None
                break
        if has_lone_surrogate(body):
            field = _field_with_surrogate(body)
            text = "holds half a surrogate pair (\\ud800 to \\udfff), which is no character"
            await _refuse(send, 400, f"{field or 'the body'}: {text}", "invalid_request_error", field)
            return
        given = False

        async def replay() -> Message:
            nonlocal given
            if not given:
                given = True
                return message or {"type": "http.request", "body": body, "more_body": False}
            return await receive()

        await self._app(scope, replay, send)

    async def _too_large(self, send: Send) -> None:
        message = f"the request body exceeds {self._max_bytes} bytes"
        await _refuse(send, 413, message, "invalid_request_error")
