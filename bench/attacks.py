"""How long each hostile request holds up others: gaps in a neighbour's stream, and the latency of /health.

    python bench/attacks.py

The requests are those of tests/hostile/attacks.py, one after the other, against `treadle serve` in a process of its
own. The first line is three calm seconds without an attack: the gaps of the machine itself. Close other programs
first.
"""

import argparse
import http.client
import json
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from hostile.attacks import attacks

CALM_S = 3.0


class Neighbour(threading.Thread):
    """Streams an answer without end; the times of its chunks."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self._address = address
        self.times: list[float] = []

    def run(self) -> None:
        while True:
            connection = http.client.HTTPConnection(self._address, timeout=120)
            body = {"prompt": "Hello", "max_tokens": 1000, "ignore_eos": True, "stream": True}
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            for _ in connection.getresponse():
                self.times.append(time.perf_counter())


class Probe(threading.Thread):
    """Asks /health every 5 ms; the start and the end of each."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self._connection = http.client.HTTPConnection(address, timeout=120)
        self.times: list[tuple[float, float]] = []

    def run(self) -> None:
        while True:
            start = time.perf_counter()
            self._connection.request("GET", "/health")
            self._connection.getresponse().read()
            self.times.append((start, time.perf_counter()))
            time.sleep(0.005)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only the requests whose name contains this")
    only = parser.parse_args().only
    command = [sys.executable, "-m", "treadle", "serve", "--port", "0", "--quantization", "int8",
               "--kv-cache-memory", "256M", "--max-num-seqs", "32", "--log-stats-interval-s", "0"]  # fmt: skip
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    line = next(line for line in server.stderr if "API: " in line)
    address = urlsplit(line.split("API: ")[1].split(",")[0]).netloc
    threading.Thread(target=server.stderr.read, daemon=True).start()
    neighbour, probe = Neighbour(address), Probe(address)
    neighbour.start()
    probe.start()
    time.sleep(2)

    def longest(start: float) -> tuple[float, float]:
        """The longest gap of the stream and the longest answer of /health since `start`, in ms."""
        time.sleep(0.3)
        times = [t for t in neighbour.times if t >= start - 0.5]
        gap = max((b - a for a, b in pairwise(times) if b >= start), default=float("nan"))
        return gap * 1e3, max(end - begin for begin, end in probe.times if end >= start) * 1e3

    print(f"{'request':50} {'status':>6} {'s':>6} {'stream ms':>10} {'health ms':>10}")
    start = time.perf_counter()
    time.sleep(CALM_S)
    print("{:50} {:>6} {:6.2f} {:10.0f} {:10.0f}".format("(none)", "", CALM_S, *longest(start)))
    for attack in attacks():
        if only not in attack.name:
            continue
        start = time.perf_counter()
        connection = http.client.HTTPConnection(address, timeout=120)
        connection.request("POST", attack.path, attack.content, {"content-type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        took = time.perf_counter() - start
        note = "" if answer.status == attack.status else f"  expected {attack.status}: {text[:200]!r}"
        print("{:50} {:6} {:6.2f} {:10.0f} {:10.0f}".format(attack.name, answer.status, took, *longest(start)) + note)
    server.terminate()


if __name__ == "__main__":
    main()
