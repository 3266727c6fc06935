"""`treadle bench serve` against stand-in servers, one per dialect of the API."""

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from treadle.cli.main import main

MODELS = json.dumps({"data": [{"id": "m"}]}).encode()


class StandIn(BaseHTTPRequestHandler):
    """Lists a model, and answers every POST with `answer`. The end of an answer is the end of its connection."""

    answer = staticmethod(lambda handler: None)

    def do_GET(self):
        self.begin(200, "application/json")
        self.wfile.write(MODELS)

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.answer(self)

    def begin(self, status, content_type):
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.end_headers()

    def log_message(self, format, *args):
        pass


@contextlib.contextmanager
def standing_in(answer):
    handler = type("Handler", (StandIn,), {"answer": staticmethod(answer)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def stream(*blocks, pause_s=0.0):
    """An answer of these blocks, as they are."""

    def answer(handler):
        handler.begin(200, "text/event-stream")
        for block in blocks:
            handler.wfile.write(block.encode())
            time.sleep(pause_s)

    return answer


def chunk(*, delta=None, text=None, finish=None, **more):
    """An event with one choice."""
    choice = {"index": 0, "finish_reason": finish}
    choice |= {} if text is None else {"text": text}
    choice |= {} if delta is None else {"delta": delta}
    return f"data: {json.dumps({'choices': [choice], **more})}\n\n"


def usage(count):
    return f"data: {json.dumps({'choices': [], 'usage': {'prompt_tokens': 7, 'completion_tokens': count}})}\n\n"


DONE = "data: [DONE]\n\n"
TWO = chunk(text="a") + chunk(text="b", finish="length")


def bench(url, path, *options, status=0):
    options = ("--base-url", url, "--num-warmups", 0, "--output-len", 2, "--output", path, *options)
    assert main(["-q", "bench", "serve", *map(str, options)]) == status
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    ("blocks", "num_texts"),
    [
        pytest.param((TWO, usage(2), DONE), 2, id="openai"),
        pytest.param((TWO + usage(2), ""), 2, id="no last event"),
        pytest.param((chunk(text="a"), chunk(text="b"), usage(2), DONE), 2, id="no finish_reason"),
        pytest.param((TWO, usage(2), "data: [DONE]"), 2, id="no empty line at the end"),
        pytest.param(
            (chunk(text="a", error=None, usage=None), chunk(text="b", finish="stop", error=None), usage(2), DONE),
            2,
            id="null error and usage",
        ),
        pytest.param(
            (
                chunk(delta={"role": "assistant", "content": ""}),
                chunk(delta={"role": "assistant", "content": "a"}),
                chunk(delta={"role": "assistant", "content": "b"}),
                chunk(delta={"role": "assistant", "content": None}, finish="stop"),
                usage(2),
                DONE,
            ),
            2,
            id="role in every chunk",
        ),
        pytest.param(
            (
                'data: {"choices":[{"delta":null}]}\n\n',
                'data: {"choices":null}\n\n',
                'data: {"id":"x"}\n\n',
                chunk(delta={"content": "a"}),
                chunk(delta={"reasoning_content": "b"}, finish="stop"),
                'data: {"choices":[null],"usage":{"prompt_tokens":7,"completion_tokens":2}}\n\n',
                DONE,
            ),
            2,
            id="missing and null parts",
        ),
        pytest.param((TWO.replace("data: ", "data:"), usage(2), "data:[DONE]\n\n"), 2, id="no space"),
        pytest.param((TWO.replace("\n", "\r\n"), usage(2), DONE), 2, id="CRLF"),
        pytest.param(
            (": ping\n\nevent: ping\ndata: {}\n\n", "id: 3\nretry: 9\nevent: chunk\n" + TWO, ":\n\n", usage(2), DONE),
            2,
            id="comments and names of events",
        ),
        pytest.param(tuple(TWO + usage(2) + DONE), 2, id="byte by byte"),
        pytest.param(('data: {"choices":\ndata: [{"text":"a"}]}\n\n', usage(1), DONE), 1, id="data of two lines"),
    ],
)
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_every_dialect_succeeds(blocks, num_texts, endpoint, tmp_path):
    with standing_in(stream(*blocks)) as url:
        figures = bench(url, tmp_path / "r.json", "--num-requests", 2, "--endpoint", endpoint)
    assert figures["failures"] == {}
    for result in figures["results"]:
        assert (result["prompt_tokens"], result["output_tokens"]) == (7, num_texts)
        assert len(result["tokens_at"]) == num_texts


def test_the_first_token_is_the_first_text(tmp_path):
    blocks = (
        chunk(delta={"role": "assistant", "content": ""}),
        chunk(delta={"role": "assistant", "content": "a"}),
        chunk(delta={}, finish="stop"),
        usage(1) + DONE,
    )
    with standing_in(stream(*blocks, pause_s=0.1)) as url:
        (result,) = bench(url, tmp_path / "r.json", "--num-requests", 1, "--endpoint", "chat")["results"]
    (first,) = result["tokens_at"]
    assert first >= result["sent"] + 0.1  # the pause after the chunk that only holds the role


def test_without_usage_the_chunks_with_text_are_counted(tmp_path, capsys):
    blocks = (chunk(text=""), chunk(text="a"), chunk(text="b"), chunk(text="", finish="stop"), DONE)
    with standing_in(stream(*blocks)) as url:
        figures = bench(url, tmp_path / "r.json", "--num-requests", 3)
    assert (figures["without_usage"], figures["output_tokens"], figures["prompt_tokens"]) == (3, 6, 0)
    assert "3 successful requests came without usage" in capsys.readouterr().out


def says(status, content_type, text):
    def answer(handler):
        handler.begin(status, content_type)
        handler.wfile.write(text.encode())

    return answer


def breaks_off(handler):
    handler.send_response(500)
    handler.send_header("content-length", "100")
    handler.end_headers()
    handler.wfile.write(b"oh")


def closes(handler):
    handler.close_connection = True


@pytest.mark.parametrize(
    ("answer", "kind", "error"),
    [
        (stream(chunk(text="a"), 'data: {"error": "no memory"}\n\n', DONE), "error in the stream", "no memory"),
        (stream('data: {"error": {"message": "no memory"}}\n\n', DONE), "error in the stream", "no memory"),
        (stream('data: {"error": {"code": 5}}\n\n', DONE), "error in the stream", "{'code': 5}"),
        (stream('data: {"object": "error", "message": "bad"}\n\n'), "error in the stream", "bad"),
        (stream(chunk(text="a")), "stream cut before its end", "chunks with text: 1"),
        (stream(chunk(text="a"), 'data: {"choices": [{"te'), "stream cut before its end", "chunks with text: 1"),
        (stream(), "stream cut before its end", "chunks with text: 0"),
        (stream(chunk(text="", finish="stop"), DONE), "no text", "the stream ended without text"),
        (stream("data: oops\n\n", DONE), "invalid answer", "a chunk that is no JSON object: oops"),
        (stream("data: [1]\n\n", DONE), "invalid answer", "a chunk that is no JSON object: [1]"),
        (stream("data: \ufffd\n\n"), "invalid answer", "a chunk that is no JSON object: \ufffd"),
        (says(200, "application/json", '{"error": "no streams"}'), "invalid answer", "not a stream: no streams"),
        (says(502, "text/html", "<h1>Bad\n\nGateway</h1>"), "HTTP 502", "<h1>Bad Gateway</h1>"),
        (says(400, "application/json", '{"error": "bad"}'), "HTTP 400", "bad"),
        (says(404, "application/json", '{"detail": "Not Found"}'), "HTTP 404", "Not Found"),
        (says(500, "application/json", "[]"), "HTTP 500", "[]"),
        (says(429, "text/plain", ""), "HTTP 429", "no text in the answer"),
        (breaks_off, "HTTP 500", "no text in the answer"),
        (closes, "connection closed before an answer", "Server disconnected"),
    ],
)
def test_every_failure_is_counted_for_what_it_is(answer, kind, error, tmp_path, capsys):
    calls = []

    def one_good(handler):
        calls.append(handler)
        (stream(TWO, usage(2), DONE) if len(calls) == 2 else answer)(handler)

    with standing_in(one_good) as url:
        figures = bench(url, tmp_path / "r.json", "--num-requests", 4, "--concurrency", 1)
    assert figures["failures"] == {kind: {error: 3}}
    assert [result["failure"] for result in figures["results"]] == [kind, None, kind, kind]
    assert figures["output_tokens"] == 2
    table = capsys.readouterr().out
    assert "1 of 4 requests succeeded" in table
    assert f"failed 3×: {kind}\n    3× {error}\n" in table


def test_a_server_that_is_gone(tmp_path, capsys):
    with standing_in(stream()) as url:
        pass
    options = ("--base-url", url, "--output", str(tmp_path / "r.json"))
    assert main(["bench", "serve", *options]) == 1
    captured = capsys.readouterr()
    assert captured.err == f"treadle: error: no server listens at {url} (Connection refused)\n"
    assert captured.out == ""


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ('{"data": []}', "lists no model (status 200"),
        ('{"data": {}}', "lists no model (status 200"),
        ("<html>\n\n</html>", "lists no model (status 200: <html> </html>)"),
        ('{"data": [{"name": "m"}]}', "lists no model"),
    ],
)
def test_a_server_without_models(models, words, capsys):
    with standing_in(stream()) as url, pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "MODELS", models.encode())
        assert main(["-q", "bench", "serve", "--base-url", url]) == 1
    captured = capsys.readouterr().err
    assert captured.startswith(f"treadle: error: {url}/v1/models ")
    assert words in captured
    assert len(captured.splitlines()) == 1
