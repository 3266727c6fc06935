"""Connections that are slow, endless or too large, hosts and origins, and the end of a server."""

import asyncio
import contextlib
import json
import signal
import socket
import threading
import time

import httpx2
import pytest
from fastapi import FastAPI

from server.conftest import PATIENCE_S, running, serving
from treadle.server.connection import MAX_HEADER_BYTES, MAX_HEADERS, LimitedConnection
from treadle.server.http import HttpServer
from treadle.server.middleware import MAX_ITEMS, CheckBody, hosts_for

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def connected(server):
    with socket.create_connection(server.url.removeprefix("http://").split(":"), timeout=PATIENCE_S) as connection:
        yield connection


def rest(connection):
    """What the server sends until it closes the connection."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(2**16):
            parts.append(part)
    return b"".join(parts)


def status(answer):
    return int(answer.split(b" ", 2)[1])


def send_until_closed(connection, data, most):
    """Send `data` again and again; the number of bytes sent before the server closed."""
    sent = 0
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while sent < most:
            connection.sendall(data)
            sent += len(data)
    return sent


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(LimitedConnection, "receive_timeout_s", 0.3)
    monkeypatch.setattr(LimitedConnection, "stalled_reader_s", 0.3)


def test_headers_are_limited(server):
    most = 2**24
    with connected(server) as connection:  # one header that does not end
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ")
        assert send_until_closed(connection, b"a" * 2**14, most) < most
    with connected(server) as connection:  # many headers
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        connection.sendall(b"".join(b"X%d: y\r\n" % i for i in range(2 * MAX_HEADERS)))
        answer = rest(connection)
        assert status(answer) == 431
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == 431
    with connected(server) as connection:  # all at once, complete
        connection.sendall(b"GET /" + b"a" * MAX_HEADER_BYTES + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert status(rest(connection)) == 431
    assert httpx2.get(server.url + "/health", headers={"x-long": "a" * (MAX_HEADER_BYTES // 2)}).status_code == 200


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"POST /v1/compl",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{",
    ],
    ids=["nothing", "half a line", "half of the headers", "half a body"],
)
def test_requests_that_do_not_arrive_are_given_up(server, impatient, start):
    with connected(server) as connection:
        connection.sendall(start)
        assert status(rest(connection)) == 408
    server.wait_until_idle()


def test_a_body_behind_its_answer_does_not_hold_a_connection(server, impatient):
    with connected(server) as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000000\r\n\r\n")
        assert status(connection.recv(2**16)) == 413
        sent = 0
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while sent < 6000:
                connection.sendall(b"x")
                sent += 1
                time.sleep(0.01)
        assert sent < 6000


def test_blank_lines_after_an_answer_do_not_hold_a_connection(server, impatient):
    with connected(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert status(connection.recv(2**16)) == 200
        connection.sendall(b"\r\n")
        rest(connection)


def test_pipelined_requests_are_limited(server):
    with connected(server) as connection:
        body = json.dumps({"prompt": "Hello", "max_tokens": 500, "ignore_eos": True}).encode()
        request = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(request + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        more = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        assert send_until_closed(connection, more * 100, 2**24) < 2**24
    server.wait_until_idle()


def test_small_bodies_are_received_while_large_ones_fill_the_limit(server, monkeypatch):
    middleware = server.app.middleware_stack
    while not isinstance(middleware, CheckBody):
        middleware = middleware.app if hasattr(middleware, "app") else middleware._app
    monkeypatch.setattr(middleware, "_max_held_bytes", 100_000)
    large = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 200000\r\n\r\n" + b" " * 99_000
    with connected(server) as connection:
        connection.sendall(large)
        deadline = time.monotonic() + PATIENCE_S
        while middleware._held_bytes < 99_000:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 1}).status_code == 200
        content = json.dumps({"prompt": "x" * 70_000, "max_tokens": 1})
        refused = httpx2.post(server.url + "/v1/completions", content=content, timeout=PATIENCE_S)
        assert refused.status_code == 503


@pytest.mark.parametrize("key", ["clà", "clÅ", "clé", "😀"])
def test_a_key_may_have_any_characters(key):
    with running(app_options={"api_key": key}) as server:
        for given, expected in ((key, 200), (key + "x", 401), ("x", 401)):
            headers = {"authorization": b"Bearer " + given.encode()}
            assert httpx2.get(server.url + "/version", headers=headers).status_code == expected
        for given in (
            b"\xff",
            b"Bearer \xff\xfe",
            b"Bearer " + key.encode()[:-1],
            b"Bearer " + bytes(range(128, 256)),
        ):
            assert httpx2.get(server.url + "/version", headers={"authorization": given}).status_code == 401


def test_a_key_from_the_environment_is_utf8_in_any_locale(monkeypatch):
    for name, value in {
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "TREADLE_API_KEY": "clé",
    }.items():
        monkeypatch.setenv(name, value)
    with serving("--kv-cache-memory", "64M") as (_, url):
        for given, expected in ("clé", 200), ("cl", 401):
            headers = {"authorization": b"Bearer " + given.encode()}
            assert httpx2.get(url + "/version", headers=headers).status_code == expected


def test_a_server_whose_application_cannot_start_does_not_start():
    app = FastAPI()
    app.add_middleware(lambda app: 1 / 0)
    app.state.service = None
    server = HttpServer(app, log_level="critical")
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.suppress(TimeoutError, SystemExit):
        asyncio.run(asyncio.wait_for(server.serve([listener]), 5))
    assert not server.started


def test_a_long_answer_may_take_longer_than_a_request(server, impatient):
    """Also with a second request behind it on the same connection."""
    body = json.dumps({"prompt": "Hello", "max_tokens": 200, "ignore_eos": True}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    request += b"Content-Length: %d\r\n" % len(body)
    with connected(server) as connection:
        connection.sendall(request + b"\r\n" + body + request + b"Connection: close\r\n\r\n" + body)
        assert rest(connection).count(b'"finish_reason":"length"') == 2


def test_a_client_that_does_not_read_is_disconnected(server, impatient):
    """Its requests end, and their blocks are free."""
    body = {"prompt": "Hello", "max_tokens": 900, "n": 8, "ignore_eos": True, "stream": True, "temperature": 1}
    content = json.dumps({**body, "logprobs": 5}).encode()
    with connected(server) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(content) + content
        )
        deadline = time.monotonic() + PATIENCE_S
        while server.server.server_state.connections:
            assert time.monotonic() < deadline, "it is still connected"
            time.sleep(0.05)
    server.wait_until_idle()


def test_connections_are_limited(server, monkeypatch):
    monkeypatch.setattr(LimitedConnection, "max_connections", 5)
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(connected(server))
        with connected(server) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert status(rest(connection)) == 503
    deadline = time.monotonic() + PATIENCE_S
    while server.server.server_state.connections:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert httpx2.get(server.url + "/health").status_code == 200


def test_bodies_with_too_many_parts_are_not_parsed(server):
    for content in (b"[" * 2**20, b'{"prompt": [' + b"1," * MAX_ITEMS + b"1]}", b"{}," * 2**20):
        answer = httpx2.post(server.url + "/v1/completions", content=content, timeout=PATIENCE_S)
        assert answer.status_code == 400
        assert f"at most {MAX_ITEMS}" in answer.json()["error"]["message"]


def test_hosts():
    assert hosts_for("0.0.0.0") == hosts_for("192.168.0.7") == ["*"]
    assert hosts_for("127.0.0.1") == ["127.0.0.1", "localhost", "[::1]"]
    assert hosts_for("0:0:0:0:0:0:0:1") != ["*"] != hosts_for("::ffff:127.0.0.1")
    assert hosts_for("::1") == ["[::1]", "localhost", "127.0.0.1"]
    with running(app_options={"allowed_hosts": [*hosts_for("127.0.0.1"), "*.example.com"]}) as server:
        for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:80", "[::1]:8000", "a.example.com:1", "localhost."):
            assert httpx2.get(server.url + "/version", headers={"host": host}).status_code == 200, host
        for host in ("evil.example", "example.com", "localhost.evil.example", "127.0.0.1.evil.example", "", "[::1"):
            answer = httpx2.get(server.url + "/version", headers={"host": host})
            assert answer.status_code == 403, host
            assert "--allowed-hosts" in answer.json()["error"]["message"]


def test_pages_from_elsewhere_may_use_the_api_only_if_allowed(server):
    asked = {"origin": "https://app.example", "access-control-request-method": "POST",
             "access-control-request-headers": "authorization,content-type"}  # fmt: skip
    answer = httpx2.options(server.url + "/v1/completions", headers=asked)
    assert "access-control-allow-origin" not in answer.headers
    with running(app_options={"allowed_origins": ["https://app.example"], "api_key": "s3cret"}) as other:
        answer = httpx2.options(other.url + "/v1/completions", headers=asked)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        key = {"authorization": "Bearer s3cret"}
        answer = httpx2.get(other.url + "/version", headers={"origin": "https://app.example", **key})
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        answer = httpx2.get(other.url + "/version", headers={"origin": "https://evil.example", **key})
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_is_unfinished_after_the_grace_ends_with_an_error(number):
    """While it waits, /health answers 503 and new requests are refused."""
    long = {"prompt": "Hello", "max_tokens": 3900, "ignore_eos": True}
    grace = "1" if number == signal.SIGTERM else "600"  # the second Ctrl-C ends the grace
    whole = {}

    def ask():
        whole["answer"] = httpx2.post(url + "/v1/completions", json=long, timeout=PATIENCE_S)

    with serving("--kv-cache-memory", "512M", "--shutdown-grace", grace, log=(log := [])) as (process, url):
        asking = threading.Thread(target=ask)
        asking.start()
        body = {**long, "stream": True}
        with httpx2.stream("POST", url + "/v1/completions", json=body, timeout=PATIENCE_S) as answer:
            events = answer.iter_lines()
            next(events)
            while httpx2.get(url + "/load").json()["server_load"] < 2:
                time.sleep(0.01)
            process.send_signal(number)
            while (health := httpx2.get(url + "/health")).status_code == 200:
                time.sleep(0.01)
            assert (health.status_code, health.text) == (503, "shutting down")
            assert httpx2.post(url + "/v1/completions", json=long).status_code == 503
            if number == signal.SIGINT:
                process.send_signal(number)
            lines = [line for line in events if line]
        asking.join()
        process.wait(timeout=PATIENCE_S)
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["error"]["message"] == "the server is shutting down"
    assert whole["answer"].status_code == 503
    assert whole["answer"].json()["error"]["message"] == "the server is shutting down"
    text = "".join(log)
    assert "Traceback" not in text
    if number == signal.SIGTERM:  # of two signals at once, the second may end the wait before it is announced
        assert "waiting up to" in text
        assert "press Ctrl-C again" in text
