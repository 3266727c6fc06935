"""`treadle bench serve`: measure latency and throughput of a server with an OpenAI-compatible API under load."""

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.cli import EXIT_INTERRUPTED
from treadle.cli.options import as_text
from treadle.core.errors import UsageError
from treadle.core.extras import extra
from treadle.core.settings import check_count
from treadle.loadgen import report, workload

if TYPE_CHECKING:
    from treadle.loadgen.client import Result

EXAMPLES = f"""examples:
  treadle bench serve --concurrency 32 --num-requests 200
  treadle bench serve --rate 4 --prompt-len 512 --output-len 64 --goodput ttft:500 tpot:50
  treadle bench serve --trace azure-llm-2023-conv.csv --num-requests 300 --length-scale 0.1 --rate 3
  treadle bench serve --base-url http://127.0.0.1:8001 --output result.json

measurements:
{report.METRICS_HELP}
"""

DEFAULT_CONCURRENCY = 8


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    bench = commands.add_parser(
        "bench", help="measure a server under load", description="Measure a server under load."
    )
    kinds = bench.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    parser = kinds.add_parser(
        "serve",
        help="a server with an OpenAI-compatible API",
        description="Send streaming requests to a server with an OpenAI-compatible API, and report latencies, "
        "throughput and goodput.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    group = parser.add_argument_group("server")
    group.add_argument("--base-url", default="http://127.0.0.1:8000", help="URL without /v1 (default: %(default)s)")
    group.add_argument("--model", help="name of the model (default: the first one listed by the server)")
    group.add_argument("--api-key", help="key to send (or set TREADLE_API_KEY)")
    group.add_argument(
        "--endpoint", choices=sorted(workload.ENDPOINTS), default="completions",
        help="completions sends token ids, chat sends the same number of words (default: %(default)s)",
    )  # fmt: skip
    group = parser.add_argument_group("load")
    group.add_argument("--num-requests", type=int, default=100, help="number of requests (default: %(default)s)")
    group.add_argument(
        "--rate",
        type=float,
        help="requests/s, open loop: Poisson arrivals, or the trace's arrivals scaled to this rate",
    )
    group.add_argument(
        "--concurrency", type=int, help=f"requests in flight at once, closed loop (default: {DEFAULT_CONCURRENCY})"
    )
    group.add_argument(
        "--trace", type=Path, help="trace file with lengths and arrivals: Azure's CSV or Mooncake's JSON lines"
    )
    group.add_argument(
        "--length-scale", type=float, default=1.0, help="factor for the lengths in the trace (default: %(default)s)"
    )
    group.add_argument(
        "--prompt-len", type=int, default=128, help="prompt tokens, without a trace (default: %(default)s)"
    )
    group.add_argument(
        "--output-len", type=int, default=64, help="output tokens, without a trace (default: %(default)s)"
    )
    group.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction, default=True,
        help="generate the full output length (default: on; a vLLM field that some servers may refuse)",
    )  # fmt: skip
    group.add_argument("--temperature", type=float, default=0.0, help="sampling temperature (default: %(default)s)")
    group.add_argument(
        "--vocab-size", type=int, default=10_000, help="draw token ids below this number (default: %(default)s)"
    )
    group.add_argument(
        "--num-warmups", type=int, default=2, help="warm-up requests, not measured (default: %(default)s)"
    )
    group.add_argument("--seed", type=int, default=0, help="seed for prompts and arrivals (default: %(default)s)")
    group = parser.add_argument_group("result")
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="NAME:MS",
        help=f"latency bounds for goodput: {', '.join(report.BOUNDED)}",
    )  # fmt: skip
    group.add_argument(
        "--output", type=Path, metavar="FILE.json", help="also write the results and every request to this file"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    with extra("bench", "treadle bench serve"):
        import uvloop

        from treadle.loadgen import client

    _check(args)
    bounds = _bounds(args.goodput)
    api_key = args.api_key or os.environ.get("TREADLE_API_KEY")
    api_key = None if api_key is None else as_text("--api-key", api_key)
    base_url = args.base_url.rstrip("/").removesuffix("/v1")
    given = None if args.model is None else as_text("--model", args.model)
    try:
        model, max_len = uvloop.run(client.describe_server(base_url, api_key))
    except client.ServerError as error:
        print(f"treadle: error: {error}", file=sys.stderr)
        return 1
    target = client.Target(
        base_url=base_url,
        model=given or model,
        endpoint=args.endpoint,
        api_key=api_key,
        ignore_eos=args.ignore_eos,
        extra={"temperature": args.temperature},
    )
    jobs = _jobs(args, max_len)
    is_open_loop = args.rate is not None or (args.trace is not None and args.concurrency is None)
    concurrency = None if is_open_loop else args.concurrency or DEFAULT_CONCURRENCY
    results: list[Result] = []
    is_interrupted = False
    try:
        warmups = [replace(job, prompt=job.prompt[::-1], at=None) for job in jobs[: args.num_warmups]]
        uvloop.run(client.run(target, warmups, concurrency=1, on_end=lambda result: None))
        with tqdm(total=len(jobs), unit=" requests", disable=args.quiet or None, leave=False) as bar:

            def on_end(result: "Result") -> None:
                results.append(result)
                bar.update()

            uvloop.run(client.run(target, jobs, concurrency=concurrency, on_end=on_end))
    except KeyboardInterrupt:
        is_interrupted = True
    results.sort(key=lambda result: result.sent)
    summary = report.summarize(results, bounds)
    load = {name: _plain(value) for name, value in vars(args).items() if name not in ("run", "api_key", "quiet")}
    summary |= {"interrupted": is_interrupted, "model": target.model, "load": load}
    if args.output is not None:
        _write(args.output, {**summary, "results": report.details(results)})
    if is_interrupted:
        print(f"interrupted: {len(jobs) - len(results)} of {len(jobs)} requests had not finished")
    print(report.render(summary))
    if is_interrupted:
        return EXIT_INTERRUPTED
    return 0 if summary["failed"] < len(results) else 1


def _check(args: argparse.Namespace) -> None:
    for name in ("num_requests", "concurrency", "prompt_len", "output_len"):
        value = getattr(args, name)
        if value is not None:
            check_count(f"--{name.replace('_', '-')}", value)
    for name in ("rate", "length_scale"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise UsageError(f"--{name.replace('_', '-')}", f"must be greater than 0, got {value:g}")
    check_count("--vocab-size", args.vocab_size, low=2)
    if args.rate is not None and args.concurrency is not None:
        raise UsageError("--rate", "give at most one of --rate and --concurrency")
    if not args.base_url.startswith(("http://", "https://")):
        raise UsageError("--base-url", f"must begin with http:// or https://, got {args.base_url!r}")


def _jobs(args: argparse.Namespace, max_len: int | None) -> list[workload.Job]:
    if args.trace is None:
        jobs = workload.random_jobs(
            args.num_requests, args.prompt_len, args.output_len, vocab_size=args.vocab_size, seed=args.seed
        )
    else:
        jobs = workload.trace_jobs(
            args.trace, args.num_requests, length_scale=args.length_scale, max_len=max_len or 10**9,
            vocab_size=args.vocab_size, seed=args.seed,
        )  # fmt: skip
        if args.concurrency is not None:
            jobs = [replace(job, at=None) for job in jobs]
    return jobs if args.rate is None else workload.at_rate(jobs, args.rate, seed=args.seed)


def _bounds(texts: list[str]) -> dict[str, float]:
    bounds = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            bound = float(value)
        except ValueError:
            bound = 0.0
        if name not in report.BOUNDED or not bound > 0:
            raise UsageError(
                "--goodput", f"must be NAME:MS, where NAME is one of {', '.join(report.BOUNDED)}, got {text!r}"
            )
        bounds[name] = bound
    return bounds


def _write(path: Path, data: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(data, indent=1), encoding="utf-8")
    except OSError as error:
        raise UsageError("--output", f"{path} cannot be written ({error})") from error


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
