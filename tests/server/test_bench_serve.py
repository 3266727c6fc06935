"""`treadle bench serve` against a real server, and against one that misbehaves."""

import json
import socket
import threading

import httpx2
import pytest

from server.conftest import running
from treadle.cli.main import main

pytestmark = pytest.mark.slow


def bench(server, *options):
    return main(["-q", "bench", "serve", "--base-url", server.url, *map(str, options)])


def load(path):
    return json.loads(path.read_text())


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_closed_loop(server, tmp_path, capsys, endpoint):
    path = tmp_path / "result.json"
    before = _generated(server)
    options = ("--num-requests", 12, "--concurrency", 4, "--prompt-len", 20, "--output-len", 6, "--num-warmups", 1)
    assert bench(server, *options, "--endpoint", endpoint, "--goodput", "e2el:60000", "--output", path) == 0
    table = capsys.readouterr().out
    assert "12 of 12 requests succeeded" in table
    assert "100% of requests" in table
    figures = load(path)
    assert figures["most_at_once"] <= 4
    assert figures["output_tokens"] == 12 * 6
    if endpoint == "completions":
        assert figures["prompt_tokens"] == 12 * 20
    # The server's own counts, which include the warm-up.
    assert _generated(server) - before == 13 * 6
    for result in figures["results"]:
        assert result["error"] is None
        assert len(result["tokens_at"]) <= 6
        assert result["sent"] <= result["tokens_at"][0] <= result["tokens_at"][-1] <= result["ended"]
    assert figures["load"]["output_len"] == 6


def _generated(server):
    text = httpx2.get(server.url + "/metrics").text
    lines = [line for line in text.splitlines() if line.startswith("vllm:generation_tokens_total")]
    return float(lines[0].split()[-1])


def test_an_open_loop_sends_at_the_given_times(server, tmp_path):
    path = tmp_path / "result.json"
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 1000 * i, "input_length": 512, "output_length": 32, "hash_ids": [i]} for i in range(5)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    options = ("--trace", trace, "--rate", 10, "--length-scale", 0.125, "--num-warmups", 0)
    assert bench(server, *options, "--output", path) == 0
    figures = load(path)
    assert (figures["prompt_tokens"], figures["output_tokens"]) == (5 * 64, 5 * 4)
    for i, result in enumerate(figures["results"]):
        # One second apart in the trace, five in four seconds; at 10 per second, an eighth of a second apart.
        assert result["sent"] - result["late"] == pytest.approx(i * 0.125, abs=0.01)


def test_refusals_are_counted(tmp_path, capsys):
    with running(max_num_queued_requests=1, max_num_seqs=1) as server:
        options = ("--num-requests", 12, "--concurrency", 12, "--output-len", 30, "--num-warmups", 0)
        assert bench(server, *options) == 0
        captured = capsys.readouterr().out
        assert "failed" in captured
        assert "HTTP 503" in captured
        assert bench(server, "--num-requests", 3, "--output-len", 5000) == 1
        captured = capsys.readouterr().out
        assert "failed 3×: HTTP 400" in captured
        assert "3× max_tokens" in captured


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--rate", "0"), "--rate"),
        (("--rate", "1", "--concurrency", "2"), "--concurrency"),
        (("--num-requests", "0"), "--num-requests"),
        (("--goodput", "ttft"), "--goodput"),
        (("--goodput", "speed:3"), "ttft, tpot, e2el"),
        (("--base-url", "localhost:8000"), "http://"),
        (("--trace", "none.csv"), "none.csv"),
    ],
)
def test_invalid_options_are_reported_in_one_line(server, capsys, options, word):
    assert bench(server, *options) == 2
    captured = capsys.readouterr().err
    assert word in captured
    assert len(captured.splitlines()) == 1


def test_a_server_that_drops_the_connection(capsys):
    """The server lists a model, starts a stream, and closes the connection."""
    listener = socket.create_server(("127.0.0.1", 0))
    models = json.dumps({"data": [{"id": "m"}]}).encode()

    def serve():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                head = connection.recv(65536)
                if head.startswith(b"GET"):
                    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(models) + models)
                else:
                    connection.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\ndata:\r\n")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    assert main(["-q", "bench", "serve", "--base-url", url, "--num-requests", "3", "--num-warmups", "0"]) == 1
    captured = capsys.readouterr().out
    assert "0 of 3 requests" in captured
    assert "failed 3×: stream cut before its end" in captured
    listener.close()
