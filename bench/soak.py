"""A soak: random load on a live server, some of it hostile, and checks that nothing is lost, left over or changed.

    python bench/soak.py
    python bench/soak.py --minutes 60 --seed 3

`treadle serve` runs in a process of its own with a KV pool so small that requests are preempted all the time, and
with --check-invariants. Clients send every kind of request, leave at random moments, send half a request and hang,
follow the scheduler's steps, and send the requests of tests/hostile/attacks.py. Control requests are repeated
meanwhile; their answers must not change. At the end the server must be idle, with all blocks free, metrics that add
up, and no more memory, open files and threads than at the start; and it must end in order on SIGTERM. The exit status
is 1 if a check fails.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from soak_load import CHAT, COMPLETIONS, PATIENCE_S, Account, control_jobs, events, random_job, send

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from hostile.attacks import Attack, attacks

GRACE_S = 5.0
OPTIONS = [
    "--port", "0", "--quantization", "int8", "--num-kv-blocks", "72", "--max-model-len", "1024",
    "--max-num-seqs", "16", "--max-num-batched-tokens", "128", "--swap-space", "0.008",
    "--max-num-queued-requests", "16", "--admission-headroom", "0", "--order", "priority", "--age-limit-s", "20",
    "--check-invariants", "--shutdown-grace", str(GRACE_S),
]  # fmt: skip
"""The pool holds 1,152 tokens, little more than the longest request, and the swap space about half of that."""

MAX_CLIENTS = 48
"""More than may run and queue, so that some requests get 503."""

SAMPLE_S = 2.0
MAX_GROWTH_MIB = 150
"""Of the server's memory after the first minute; a hostile body of 8 MiB parses to ten times its size."""
MAX_TREND_MIB = 60
"""Of the line fitted to the memory of the second half, over that half."""
MIN_TREND_MINUTES = 4.0
"""A shorter run has no trend: the first round of hostile requests takes a minute or two."""


@dataclass
class Sample:
    """What /proc says of the server.

    Attributes:
        time: seconds since the start of the load.
        rss, child_rss: resident memory of the server and of its child processes, MiB.
        files, threads: of the server.
    """

    time: float
    rss: float
    child_rss: float
    files: int
    threads: int

    @classmethod
    def of(cls, pid: int, time: float) -> "Sample":
        children = [
            int(child)
            for task in os.listdir(f"/proc/{pid}/task")
            for child in _read(f"/proc/{pid}/task/{task}/children").split()
        ]
        files, threads = len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))
        return cls(time, _rss(pid), sum(map(_rss, children)), files, threads)


def _read(path: str) -> str:
    """A file of /proc; empty if its process or thread has ended."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _rss(pid: int) -> float:
    text = _read(f"/proc/{pid}/statm")
    return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20 if text else 0.0


class Metrics:
    """A scrape of /metrics."""

    def __init__(self, text: str) -> None:
        self._samples = [s for family in text_string_to_metric_families(text) for s in family.samples]

    def total(self, name: str, **labels: str) -> int:
        """The sum over all samples of a name that have these labels."""
        return round(sum(s.value for s in self._samples if s.name == name and labels.items() <= s.labels.items()))

    def by(self, name: str, label: str) -> dict[str, int]:
        return {s.labels[label]: round(s.value) for s in self._samples if s.name == name}


class Soak:
    """One run.

    Args:
        process: the server.
        url: its address.
        seconds: of load.
        seed: of the load.
    """

    def __init__(self, process: subprocess.Popen[bytes], url: str, seconds: float, seed: int) -> None:
        self._process = process
        self._url = url
        self._seconds = seconds
        self._seed = seed
        self._start = time.monotonic()
        self._has_ended = asyncio.Event()
        self._num_jobs = itertools.count()
        self._level = MAX_CLIENTS
        self.account = Account()
        self.samples: list[Sample] = []
        self.failures: list[str] = []
        self._final: Metrics | None = None

    async def run(self) -> None:
        """Everything, in order; what fails is in `failures` and in the account's problems."""
        async with self._session() as session:
            await self._learn_controls(session)
            await asyncio.gather(*(self._too_long(session) for _ in range(32)))  # starts all threads of the pool
            await self._wait_until_idle(session)
        baseline = Sample.of(self._process.pid, 0.0)
        await self._load()
        async with self._session() as session:
            await self._wait_until_idle(session)
            self._check_metrics(await self._metrics(session))
            await self._check_calm_round(session)
            await self._check_blocks(session)
        await self._check_resources(baseline)
        async with self._session() as session:
            await self._check_sigterm(session)

    def _check(self, holds: bool, what: str) -> None:
        if not holds:
            self.failures.append(what)

    @contextlib.asynccontextmanager
    async def _session(self) -> AsyncIterator[aiohttp.ClientSession]:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=60)
        async with aiohttp.ClientSession(self._url, connector=connector, timeout=timeout) as session:
            yield session

    async def _get(self, session: aiohttp.ClientSession, path: str) -> str:
        async with session.get(path) as response:
            text = await response.text()
            self._check(response.status == 200, f"GET {path} gave {response.status}: {text[:200]}")
            return text

    async def _metrics(self, session: aiohttp.ClientSession) -> Metrics:
        return Metrics(await self._get(session, "/metrics"))

    async def _too_long(self, session: aiohttp.ClientSession) -> None:
        """A request that is refused once it has been tokenized, in a thread."""
        async with session.post("/v1/completions", json={"prompt": "sea " * 4000}) as response:
            await response.read()

    # The load

    async def _learn_controls(self, session: aiohttp.ClientSession) -> None:
        """Send every control request alone; a streamed one must give the same as a whole one."""
        self._controls = control_jobs()
        self._answers = [await send(session, job, self.account) for job in self._controls]
        whole = {}
        for job, answer in zip(self._controls, self._answers, strict=True):
            body = {k: v for k, v in job.body.items() if k not in ("stream", "stream_options")}
            first = whole.setdefault(json.dumps(body), answer)
            self._check(answer is not None and answer == first, f"streamed and whole answers differ: {body}")

    async def _load(self) -> None:
        """Put load on the server for a while; returns when all clients are gone."""
        self._start = time.monotonic()
        print(HEAD)
        workers: list[Coroutine[Any, Any, None]] = [
            *(self._client(number) for number in range(MAX_CLIENTS)),
            *(self._control(random.Random(f"{self._seed} control {i}")) for i in range(2)),
            *(self._hang(random.Random(f"{self._seed} hang {i}")) for i in range(4)),
            *(self._follow(random.Random(f"{self._seed} follow {i}")) for i in range(2)),
            self._attack(random.Random(f"{self._seed} attack")),
            self._change_level(random.Random(f"{self._seed} level")),
            self._watch(),
        ]
        async with asyncio.TaskGroup() as tasks:
            for worker in workers:
                tasks.create_task(worker)
            await asyncio.sleep(self._seconds)
            self._has_ended.set()

    async def _pause(self, seconds: float) -> None:
        """Sleep, but not beyond the end of the load."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._has_ended.wait(), seconds)

    async def _change_level(self, rng: random.Random) -> None:
        """Let the number of clients rise and fall."""
        while not self._has_ended.is_set():
            self._level = rng.choice((2, 8, 16, 24, 32, MAX_CLIENTS))
            await self._pause(rng.uniform(2, 10))

    async def _client(self, number: int) -> None:
        async with self._session() as session:
            while not self._has_ended.is_set():
                if number >= self._level:
                    await self._pause(0.2)
                    continue
                rng = random.Random(f"{self._seed} job {next(self._num_jobs)}")
                answer = await send(session, random_job(rng), self.account)
                await self._pause(rng.choice((0.0, 0.1, 1.0)) if answer is not None else 1.0)  # Retry-After

    async def _control(self, rng: random.Random) -> None:
        """Repeat the control requests."""
        async with self._session() as session:
            while not self._has_ended.is_set():
                number = rng.randrange(len(self._controls))
                answer = await send(session, self._controls[number], self.account)
                if answer is not None and answer != self._answers[number]:
                    self.account.problems.append(
                        f"the answer to a control request has changed: {self._controls[number].body}\n"
                        f"  was {self._answers[number]}\n  is  {answer}"
                    )
                await self._pause(rng.uniform(0, 1))

    async def _attack(self, rng: random.Random) -> None:
        """Send hostile requests, one after the other, in a new order each round."""
        async with self._session() as session:
            while True:
                for attack in rng.sample(every := list(attacks()), len(every)):
                    if self._has_ended.is_set():
                        return
                    await self._send_attack(session, attack)
                    await self._pause(rng.uniform(0, 1))

    async def _send_attack(self, session: aiohttp.ClientSession, attack: Attack) -> None:
        account = self.account
        try:
            async with asyncio.timeout(PATIENCE_S):
                headers = {"content-type": "application/json"}
                async with session.post(attack.path, data=attack.content, headers=headers) as response:
                    status, text = response.status, await response.text()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            status, text = 0, repr(error)
        generates = attack.path in (COMPLETIONS, CHAT)
        if status == 200 and generates:
            account.accepted += _num_prompts(attack)
            account.add_usage(json.loads(text)["usage"])
        elif status == 503 and generates and attack.status == 200:
            account.unknown += _num_prompts(attack) - 1  # those before the one that did not fit in the queue
        outcome = "answered" if status == 200 else str(status)
        if status not in (attack.status, 503):
            account.problems.append(f"hostile, {attack.name}: status {status}: {text[:300]}")
            outcome = "failed"
        account.outcomes["hostile", outcome] += 1

    async def _hang(self, rng: random.Random) -> None:
        """Send half a request, then nothing; leave after a while, or wait for the server to close the connection."""
        host, port = self._url.removeprefix("http://").split(":")
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        whole = f'{head}content-length: 30\r\n\r\n{{"prompt": "x", "max_tokens'.encode()
        while not self._has_ended.is_set():
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(whole[: rng.randrange(len(whole))])
            outcome = "left early"
            read = asyncio.ensure_future(reader.read())
            end = asyncio.ensure_future(self._has_ended.wait())
            await asyncio.wait([read, end], timeout=rng.choice((0.1, 2, 20, 90)), return_when="FIRST_COMPLETED")
            if read.done():
                outcome = read.result().split(b" ", 2)[1].decode() if read.result() else "closed by the server"
                if outcome != "408":
                    self.account.problems.append(f"half a request: {read.result()[:200]!r}")
            for task in (read, end):
                task.cancel()
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            self.account.outcomes["half a request", outcome] += 1

    async def _follow(self, rng: random.Random) -> None:
        """Follow the scheduler's steps for a while, at times without reading."""
        async with self._session() as session:
            while not self._has_ended.is_set():
                async with session.get("/scheduler/steps") as response:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(rng.choice((0.05, 1, 8))):
                            step = None
                            async for data in events(response):
                                record = json.loads(data)
                                if "state" in record:
                                    step = record["state"]["step"]
                                    if rng.random() < 0.2:
                                        await self._pause(10)
                                    continue
                                if step is None or record["step"] != step + 1:
                                    self.account.problems.append(f"step {record['step']} follows step {step}")
                                step = record["step"]
                    response.close()
                self.account.outcomes["follower", "left mid-stream"] += 1
                await self._pause(rng.uniform(0, 3))

    # Watching

    async def _watch(self) -> None:
        """Take samples, and print a line per minute."""
        async with self._session() as session:
            num_minutes = math.ceil(self._seconds / 60)
            for minute in range(1, num_minutes + 1):
                before = Counter(self.account.outcomes)
                first = len(self.samples)
                metrics = await self._metrics(session)
                end = self._start + 60 * minute if minute < num_minutes else math.inf
                while not self._has_ended.is_set() and time.monotonic() < end:
                    self.samples.append(Sample.of(self._process.pid, time.monotonic() - self._start))
                    await self._get(session, "/health")
                    await self._pause(SAMPLE_S)
                self._print_minute(minute, before, metrics, self.samples[first:], await self._metrics(session))

    def _print_minute(
        self, minute: int, before: Counter[tuple[str, str]], old: Metrics, samples: list[Sample], new: Metrics
    ) -> None:
        outcomes = Counter(self.account.outcomes)
        outcomes.subtract(before)
        counts: Counter[str] = Counter()
        for (kind, outcome), count in outcomes.items():
            if kind not in ("half a request", "follower"):
                counts["left" if outcome.startswith("left") else outcome] += count

        def grown(name: str, **labels: str) -> int:
            return new.total(name, **labels) - old.total(name, **labels)

        rss = [sample.rss for sample in samples]
        print(
            f"{minute:6} {counts['answered']:8} {counts['left']:6} {counts['503']:5} {counts['400']:5}"
            f" {grown('vllm:generation_tokens_total'):7} {grown('vllm:num_preemptions_total'):7}"
            f" {grown('treadle:preemptions_total', mode='swap'):6}"
            f" {statistics.median(rss):8.0f} {max(rss):6.0f} {max(s.child_rss for s in samples):6.0f}"
            f" {max(s.files for s in samples):6} {max(s.threads for s in samples):8}",
            flush=True,
        )

    # Checks

    async def _wait_until_idle(self, session: aiohttp.ClientSession) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while json.loads(await self._get(session, "/load"))["server_load"]:
            if time.monotonic() > deadline:
                self._check(False, f"requests are left {PATIENCE_S:.0f} s after the last client")
                return
            await asyncio.sleep(0.1)

    async def _check_blocks(self, session: aiohttp.ClientSession) -> None:
        await self._wait_until_idle(session)
        state = json.loads(await self._get(session, "/scheduler/state"))
        for queue in ("waiting", "running", "swapped"):
            self._check(not state[queue], f"requests are left in the queue {queue}: {state[queue]}")
        blocks = state["blocks"]
        are_free = blocks["free"] + blocks["cached"] == blocks["total"] and not blocks["referenced"]
        self._check(are_free and blocks["host_free"] == blocks["host_total"], f"not all blocks are free: {blocks}")

    def _check_metrics(self, metrics: Metrics) -> None:
        account = self.account
        self._final = metrics
        for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "treadle:num_requests_swapped"):
            self._check(metrics.total(name) == 0, f"{name} is {metrics.total(name)} when idle")
        ended = metrics.total("vllm:request_success_total")
        least, most = account.accepted, account.accepted + account.unknown
        self._check(
            least <= ended <= most, f"{ended} requests ended by the metrics, {least} to {most} by the clients"
        )
        aborted = metrics.total("vllm:request_success_total", finished_reason="abort")
        self._check(
            aborted <= account.count("left mid-stream") + account.unknown,
            f"{aborted} requests were aborted, more than clients have left",
        )
        for name in ("e2e_request_latency_seconds", "request_prompt_tokens", "request_params_n"):
            count = metrics.total(f"vllm:{name}_count")
            self._check(count == ended, f"vllm:{name} counts {count} requests, vllm:request_success {ended}")
        for name, seen in (("prompt", account.prompt_tokens), ("generation", account.output_tokens)):
            counted = metrics.total(f"vllm:{name}_tokens_total")
            self._check(counted >= seen, f"vllm:{name}_tokens counts {counted}, but clients have seen {seen}")
        for mode in ("swap", "recompute"):
            if not metrics.total("treadle:preemptions_total", mode=mode):
                print(f"warning: nothing was preempted by {mode}; the load was too light")

    async def _check_calm_round(self, session: aiohttp.ClientSession) -> None:
        """Requests whose clients stay: the metrics must count exactly what the clients have seen."""
        account, before = Account(), await self._metrics(session)
        jobs = [
            random_job(random.Random(f"{self._seed} calm {i}"), may_leave=False, may_search=False) for i in range(32)
        ]
        # Only as many at once as may queue.
        for batch in (jobs[:16], jobs[16:]):
            await asyncio.gather(*(send(session, job, account) for job in batch))
        await self._wait_until_idle(session)
        after = await self._metrics(session)
        for name, expected in (
            ("vllm:request_success_total", len(jobs)),
            ("vllm:e2e_request_latency_seconds_count", len(jobs)),
            ("vllm:prompt_tokens_total", account.prompt_tokens),
            ("vllm:generation_tokens_total", account.output_tokens),
        ):
            counted = after.total(name) - before.total(name)
            self._check(counted == expected, f"{name} has grown by {counted} in the calm round, not {expected}")
        self.failures += [f"in the calm round: {problem}" for problem in account.problems]

    async def _check_resources(self, baseline: Sample) -> None:
        deadline = time.monotonic() + 30
        while True:
            now = Sample.of(self._process.pid, time.monotonic() - self._start)
            if (now.files <= baseline.files and now.threads <= baseline.threads) or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.5)
        self._check(now.files <= baseline.files, f"{now.files} files are open, {baseline.files} at the start")
        self._check(now.threads <= baseline.threads, f"{now.threads} threads, {baseline.threads} at the start")
        first = statistics.median(s.rss for s in self.samples if s.time < 60)
        growth = now.rss - first
        print(f"\nmemory      {baseline.rss:.0f} MiB before the load, {first:.0f} in the first minute (median), "
              f"{now.rss:.0f} at the end")  # fmt: skip
        self._check(growth <= MAX_GROWTH_MIB, f"memory has grown by {growth:.0f} MiB since the first minute")
        half = [s for s in self.samples if s.time >= self._seconds / 2]
        if self._seconds < 60 * MIN_TREND_MINUTES:
            print(f"trend       not measured in less than {MIN_TREND_MINUTES:g} minutes")
            return
        slope = float(np.polyfit([s.time for s in half], [s.rss for s in half], 1)[0])
        trend = slope * self._seconds / 2
        print(f"trend       {60 * slope:+.2f} MiB per minute in the second half")
        self._check(trend <= MAX_TREND_MIB, f"memory grows: by {trend:.0f} MiB in the second half")

    async def _check_sigterm(self, session: aiohttp.ClientSession) -> None:
        """SIGTERM under load: every stream has an end, and the server ends by itself."""
        begun = asyncio.Semaphore(0)

        async def stream(max_tokens: int) -> None:
            body = {"prompt": "Hello", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
            last = ""
            with contextlib.suppress(aiohttp.ClientError):
                async with session.post(COMPLETIONS, json=body) as response:
                    async for data in events(response):
                        begun.release()
                        last = data
            self._check(last == "[DONE]", f"at SIGTERM, a stream ended with {last!r} instead of [DONE]")

        streams = [asyncio.create_task(stream(max_tokens)) for max_tokens in (50, 50, 1000, 1000)]
        for _ in streams:
            await begun.acquire()
        start = time.monotonic()
        self._process.send_signal(signal.SIGTERM)
        await asyncio.gather(*streams)
        try:
            status = await asyncio.to_thread(self._process.wait, PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._check(False, f"the server still runs {PATIENCE_S:.0f} s after SIGTERM")
            return
        took = time.monotonic() - start
        self._check(status == 0, f"after SIGTERM the server's exit status was {status}")
        print(f"SIGTERM     ended in {took:.1f} s, with four streams open and a grace of {GRACE_S:g} s")

    def print_summary(self) -> None:
        """Requests by kind and outcome, and totals of the metrics."""
        outcomes = self.account.outcomes
        columns = [outcome for outcome in OUTCOMES if self.account.count(outcome)]
        columns += sorted({outcome for _, outcome in outcomes} - set(OUTCOMES))
        print(f"\n{'requests':20}" + "".join(f"{column:>17}" for column in columns))
        for kind in sorted({kind for kind, _ in outcomes}):
            print(f"{kind:20}" + "".join(f"{outcomes[kind, column]:17}" for column in columns))
        print(f"{'all':20}" + "".join(f"{self.account.count(column):17}" for column in columns))
        metrics, account = self._final, self.account
        if metrics is None:
            return
        print(f"\nended       {_listed(metrics.by('vllm:request_success_total', 'finished_reason'))}; "
              f"the clients know of {account.accepted} to {account.accepted + account.unknown}")  # fmt: skip
        print(f"preempted   {_listed(metrics.by('treadle:preemptions_total', 'mode'))}")
        print(f"moved       {_listed(metrics.by('treadle:block_moves_total', 'move'))} blocks")
        for name, seen in (("prompt", account.prompt_tokens), ("generation", account.output_tokens)):
            print(f"{name:11} {metrics.total(f'vllm:{name}_tokens_total')} tokens, of which clients saw {seen}")
        print(f"recomputed  {metrics.total('treadle:recomputed_tokens_total')} tokens")


HEAD = (
    "minute answered   left   503   400  tokens preempt  swaps  RSS MiB    max children  files  threads\n"
    "                                                  of them   median"
)
OUTCOMES = ("answered", "left early", "left mid-stream", "503", "400", "404", "408", "failed")


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def _num_prompts(attack: Attack) -> int:
    prompt = json.loads(attack.content).get("prompt")
    return len(prompt) if isinstance(prompt, list) and isinstance(prompt[0], list) else 1


def _wait_for_address(process: subprocess.Popen[bytes], log: Path) -> str:
    while process.poll() is None:
        for line in log.read_text().splitlines():
            if "API: " in line:
                return line.split("API: ")[1].split("/v1")[0]
        time.sleep(0.05)
    sys.exit(f"the server did not start:\n{log.read_text()}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="minutes of load (default: %(default)g)")
    parser.add_argument("--seed", type=int, default=0, help="of the load (default: %(default)s)")
    parser.add_argument("--log", type=Path, help="file for the server's log (default: a temporary one)")
    args = parser.parse_args()
    log = args.log or Path(tempfile.mkdtemp(prefix="treadle-soak-")) / "server.log"
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as file:
        process = subprocess.Popen([sys.executable, "-m", "treadle", "serve", *OPTIONS], stderr=file, env=environment)
    try:
        soak = Soak(process, _wait_for_address(process, log), args.minutes * 60, args.seed)
        try:
            asyncio.run(soak.run())
        except* (aiohttp.ClientError, OSError) as errors:
            first = errors.exceptions[0]
            status = process.poll()
            state = "still runs" if status is None else f"has ended with status {status}"
            soak.failures.append(f"the server cannot be reached: {first!r}; its process {state}")
    finally:
        process.kill()
        process.wait()
    soak.print_summary()
    text = log.read_text(errors="replace")
    failures = soak.failures + soak.account.problems
    if "Traceback" in text:
        failures.append(f"the server's log holds a traceback:\n{text[text.index('Traceback') :][:3000]}")
    print()
    for failure in failures[:20]:
        print(f"FAILED: {failure}")
    if failures:
        print(f"{len(failures)} checks failed; the server's log is {log}")
        return 1
    print("all checks passed")
    if args.log is None:
        log.unlink()
        log.parent.rmdir()
    return 0


if __name__ == "__main__":
    sys.exit(main())
