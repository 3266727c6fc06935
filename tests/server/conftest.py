"""A server on the embedded model, in a thread, on a free port."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx2
import pytest

from treadle.assembly.build import build_engine
from treadle.assembly.engine_config import EngineConfig
from treadle.server.app import create_app
from treadle.server.http import HttpServer

MODEL = "tiny"
PATIENCE_S = 120
"""Timeout for events that must happen. No test measures with it: a busy machine may need most of it."""


class RunningServer:
    """An application served until `stop`."""

    def __init__(self, *, app_options=None, **config):
        config = {
            "quantization": "int8", "num_kv_blocks": 400, "max_model_len": 1024, "max_num_seqs": 16,
            "max_num_batched_tokens": 128, "log_stats_interval_s": 0, "check_invariants": True, **config,
        }  # fmt: skip
        self.built = build_engine(EngineConfig(**config))
        self.app = create_app(self.built, model_name=MODEL, **(app_options or {}))
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.server = HttpServer(self.app, grace_s=5.0, log_level="warning")
        self._thread = threading.Thread(target=lambda: asyncio.run(self.server.serve([listener])))
        self._thread.start()
        deadline = time.monotonic() + PATIENCE_S
        while not self.server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    @property
    def scheduler(self):
        return self.built.engine.scheduler

    def stop(self):
        self.server.handle_exit(signal.SIGTERM, None)
        self._thread.join(timeout=PATIENCE_S)
        assert not self._thread.is_alive()

    def post(self, path, body, **options):
        return httpx2.post(self.url + path, json=body, timeout=PATIENCE_S, **options)

    def wait_until_idle(self):
        """Wait until no request is left; then no block may be referenced."""
        deadline = time.monotonic() + PATIENCE_S
        while self.scheduler.num_unfinished_requests or self.built.engine.has_unfinished_requests:
            assert time.monotonic() < deadline, "requests are left"
            time.sleep(0.02)
        kv = self.scheduler.kv
        assert kv.num_available_blocks == kv.pool.num_blocks
        assert kv.host_pool.num_available == kv.host_pool.num_blocks


@contextlib.contextmanager
def running(**options):
    server = RunningServer(**options)
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def serving(*options, log=None):
    """`treadle serve` in a process of its own: the process, and its address. Its further log is added to `log`."""
    command = [sys.executable, "-m", "treadle", "serve", "--port", "0", "--quantization", "int8", *options]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            found = re.search(r"running on (http://\S+)", line)
            if found:
                break
        else:
            pytest.fail("".join(lines))
        log = [] if log is None else log
        rest = threading.Thread(target=lambda: log.append(process.stderr.read()))  # a full pipe would stop it
        rest.start()
        yield process, found[1]
    finally:
        process.kill()
        process.wait()
        rest.join()
        process.stderr.close()


@pytest.fixture(scope="session")
def server():
    with running() as server:
        yield server


@pytest.fixture
def client(server):
    import openai

    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client
