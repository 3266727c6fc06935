"""Report of a load generator run: percentiles, throughput, goodput."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treadle.loadgen.client import Result

SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}

MAX_ERRORS_SHOWN = 3
"""Error messages in the table per kind of failure; the plain data has them all."""

METRICS_HELP = """\
TTFT        time to first token: from sending the request to its first chunk with text
TPOT        time per output token: (last - first chunk with text) / (output tokens - 1), one value per request
ITL         inter-token latency: the time between two consecutive chunks with text, one value per pair
E2E         end-to-end latency: from sending the request to the end of its stream
throughput  successful requests only, per second from the first request sent to the end of the last one
goodput     successful requests per second that met every bound of --goodput (DistServe, Zhong et al. 2024)
late        how long after its scheduled time a request was sent: the lag of the load generator itself
Percentiles are measured values (nearest rank)."""

_BOUNDS: dict[str, "Callable[[Result], float | None]"] = {
    "ttft": lambda result: result.ttft,
    "tpot": lambda result: result.tpot,
    "e2el": lambda result: result.e2e,
}
BOUNDED = tuple(_BOUNDS)
"""Latencies that --goodput may bound."""


def summarize(results: "Sequence[Result]", bounds_ms: Mapping[str, float]) -> dict[str, Any]:
    """The figures of a run, as plain data; times in milliseconds.

    Args:
        results: all requests that ended, failures included.
        bounds_ms: bounds for goodput: ttft, tpot, e2el → milliseconds. Empty for none.
    """
    good = [result for result in results if result.failure is None]
    seconds = max(r.ended for r in good) - min(r.sent for r in results) if good else 0.0

    def per_second(count: int) -> float:
        return count / seconds if seconds > 0 else 0.0

    output_tokens = sum(r.output_tokens for r in good)
    prompt_tokens = sum(r.prompt_tokens for r in good)
    summary: dict[str, Any] = {
        "requests": len(results),
        "failed": len(results) - len(good),
        "failures": _failures(results),
        "without_usage": sum(not r.has_usage for r in good),
        "seconds": seconds,
        "prompt_tokens": prompt_tokens,
        "cached_tokens": sum(r.cached_tokens for r in good),
        "output_tokens": output_tokens,
        "requests_per_s": per_second(len(good)),
        "output_tokens_per_s": per_second(output_tokens),
        "total_tokens_per_s": per_second(prompt_tokens + output_tokens),
        "most_at_once": _most_at_once(results),
        "ttft_ms": _percentiles([r.ttft for r in good]),
        "tpot_ms": _percentiles([r.tpot for r in good if r.tpot is not None]),
        "itl_ms": _percentiles([itl for r in good for itl in r.itls]),
        "e2e_ms": _percentiles([r.e2e for r in good]),
        "late_ms": _percentiles([r.late for r in results]),
    }
    if bounds_ms:
        met = sum(all(_meets(result, name, bound) for name, bound in bounds_ms.items()) for result in good)
        summary |= {"goodput_bounds_ms": dict(bounds_ms), "goodput_requests": met, "goodput_per_s": per_second(met)}
    return summary


def details(results: "Sequence[Result]") -> list[dict[str, Any]]:
    """Every request, as plain data."""
    return [asdict(result) for result in results]


def render(summary: Mapping[str, Any]) -> str:
    """The figures as a text table."""
    lines = [
        f"{summary['requests'] - summary['failed']} of {summary['requests']} requests succeeded in "
        f"{summary['seconds']:.2f} s, at most {summary['most_at_once']} in flight",
        f"{summary['prompt_tokens']} prompt tokens ({summary['cached_tokens']} from the cache), "
        f"{summary['output_tokens']} output tokens",
        "",
        f"throughput  {summary['requests_per_s']:.2f} requests/s   "
        f"{summary['output_tokens_per_s']:.0f} output tokens/s   {summary['total_tokens_per_s']:.0f} tokens/s",
    ]
    if "goodput_per_s" in summary:
        bounds = ", ".join(f"{name} ≤ {bound:g} ms" for name, bound in summary["goodput_bounds_ms"].items())
        share = summary["goodput_requests"] / max(1, summary["requests"])
        lines.append(f"goodput     {summary['goodput_per_s']:.2f} requests/s   {share:.0%} of requests   ({bounds})")
    if summary["failed"] < summary["requests"]:
        lines += ["", f"{'ms':<6}" + "".join(f"{name:>10}" for name in ("mean", *SHARES))]
    for name in ("ttft", "tpot", "itl", "e2e", "late"):
        figures = summary[f"{name}_ms"]
        if figures and (name != "late" or figures["max"] > 0):
            title = name if name == "late" else name.upper()
            lines.append(f"{title:<6}" + "".join(f"{figures[key]:>10.1f}" for key in ("mean", *SHARES)))
    if summary["without_usage"]:
        lines.append(
            f"{summary['without_usage']} successful requests came without usage: each of their chunks with text "
            "counts as one output token, and their prompt tokens are not counted"
        )
    for kind, errors in summary["failures"].items():
        lines.append(f"failed {sum(errors.values())}×: {kind}")
        lines += [f"    {count}× {error}" for error, count in list(errors.items())[:MAX_ERRORS_SHOWN]]
        if len(errors) > MAX_ERRORS_SHOWN:
            lines.append(f"    and {len(errors) - MAX_ERRORS_SHOWN} other messages")
    return "\n".join(lines)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    ordered = sorted(seconds)
    figures = {"mean": sum(ordered) / len(ordered)}
    figures |= {name: percentile(ordered, share) for name, share in SHARES.items()}
    return {name: 1e3 * value for name, value in figures.items()}


def _meets(result: "Result", name: str, bound_ms: float) -> bool:
    value = _BOUNDS[name](result)
    return value is None or 1e3 * value <= bound_ms


def _failures(results: "Sequence[Result]") -> dict[str, dict[str, int]]:
    """Kind of failure → error message → number of requests, the most frequent first."""
    kinds = Counter(r.failure for r in results if r.failure is not None)
    return {
        kind: dict(Counter(str(r.error) for r in results if r.failure == kind).most_common())
        for kind, _ in kinds.most_common()
    }


def _most_at_once(results: "Sequence[Result]") -> int:
    changes = sorted([(r.sent, 1) for r in results] + [(r.ended, -1) for r in results])
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most
