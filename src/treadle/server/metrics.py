"""Prometheus metrics: vLLM's names where they mean the same thing, `treadle:` for metrics that vLLM lacks.

An observer counts in the engine's thread, a few additions per step; a scrape reads the counts.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from treadle.core.config import CacheConfig
from treadle.core.request import Request
from treadle.scheduler import SchedulerStats, StepOutputs, StepReport

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)

LABELS = ["model_name", "engine"]
"""The labels of all metrics, as in vLLM; the only engine is "0"."""

OLDER_NAMES = {"vllm:inter_token_latency_seconds": "vllm:time_per_output_token_seconds"}
"""Histograms that older dashboards query under another name."""

HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "vllm:time_to_first_token_seconds": ("From arrival to the first token.", SECONDS),
    "vllm:inter_token_latency_seconds": ("From one token of a sequence to the next.", SECONDS),
    "vllm:request_time_per_output_token_seconds": ("Mean time between a request's tokens.", SECONDS),
    "vllm:e2e_request_latency_seconds": ("From arrival to the end.", SECONDS),
    "vllm:request_queue_time_seconds": ("From arrival to the first step.", SECONDS),
    "vllm:request_prefill_time_seconds": ("From the first step to the first token.", SECONDS),
    "vllm:request_decode_time_seconds": ("From the first token to the last.", SECONDS),
    "vllm:request_inference_time_seconds": ("From the first step to the last token.", SECONDS),
    "vllm:request_prompt_tokens": ("Prompt length in tokens.", TOKENS),
    "vllm:request_generation_tokens": ("Output length in tokens.", TOKENS),
    "vllm:request_max_num_generation_tokens": ("Longest output of a request's sequences.", TOKENS),
    "vllm:request_params_n": ("Number of sequences requested (n).", (1, 2, 5, 10, 20)),
    "vllm:request_params_max_tokens": ("max_tokens of requests.", TOKENS),
    "vllm:iteration_tokens_total": ("Tokens computed in a step.", TOKENS),
}


class _Histogram:
    """Counts by bucket."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def add_all(self, values: npt.NDArray[np.float64]) -> None:
        for bucket, count in Counter(np.searchsorted(self._bounds, values).tolist()).items():
            self._counts[bucket] += count
        self._sum += float(values.sum())

    def family(self, name: str, text: str, labels: Sequence[str]) -> Metric:
        total, buckets = 0, []
        for bound, count in zip([*self._bounds, float("inf")], self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), total))
        family = HistogramMetricFamily(name, text, labels=LABELS)
        family.add_metric(labels, buckets, self._sum)
        return family


class Metrics(Collector):
    """Observes the engine's steps and reports them to Prometheus.

    Args:
        stats: the engine's statistics; called at every scrape.
        cache_config: shape of the KV cache.
        model_name: value of the label `model_name`.
    """

    def __init__(self, stats: Callable[[], SchedulerStats], cache_config: CacheConfig, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._stats = stats
        self._cache_config = cache_config
        self._labels = [model_name, "0"]
        self._num_prompt_tokens = 0
        self._num_recomputed_tokens = 0
        self._num_cached_tokens = 0
        self._num_generated_tokens = 0
        self._finished: Counter[str] = Counter()
        self._preemptions: Counter[str] = Counter()
        self._steps: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()
        self._block_moves: Counter[str] = Counter()
        self._histograms = {name: _Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        self.registry.register(self)

    def on_step(self, report: StepReport | None, outputs: StepOutputs | None, finished: Sequence[Request]) -> None:
        """Count the step and the requests that ended."""
        if report is not None:
            self._count_step(report)
        if outputs is not None:
            self._num_prompt_tokens += outputs.num_prompt_tokens
            self._num_recomputed_tokens += outputs.num_recomputed_tokens
            self._num_cached_tokens += outputs.num_cached_tokens
            self._num_generated_tokens += outputs.num_generated_tokens
            gaps = outputs.token_gaps
            self._histograms["vllm:inter_token_latency_seconds"].add_all(gaps[gaps > 0])  # NaN: it was the first
            for wait in outputs.first_token_waits:
                self._histograms["vllm:time_to_first_token_seconds"].add(wait)
        for request in finished:
            self._count_finished(request)

    def _count_step(self, report: StepReport) -> None:
        plan = report.plan
        self._histograms["vllm:iteration_tokens_total"].add(plan.num_batched_tokens)
        num_decodes = len(plan.rows) - plan.num_prefills
        kind = "mixed" if plan.num_prefills and num_decodes else "prefill" if plan.num_prefills else "decode"
        self._steps["idle" if plan.is_empty else kind] += 1
        for preemption in report.preempted:
            self._preemptions[preemption.mode.value] += 1
        for refusal in report.refusals:
            self._refusals[refusal.reason.value] += 1
        for name in ("swap_out", "swap_in", "copy"):
            self._block_moves[name] += len(getattr(plan.moves, name))

    def _count_finished(self, request: Request) -> None:
        metrics = request.metrics
        reasons = {seq.finish_reason.value for seq in request.sequences if seq.finish_reason is not None}
        self._finished[min(reasons, default="abort")] += 1
        params, lengths = request.sampling_params, [seq.num_output_tokens for seq in request.sequences]
        values: dict[str, float | None] = {
            "vllm:request_prompt_tokens": len(request.prompt_token_ids),
            "vllm:request_generation_tokens": sum(lengths),
            "vllm:request_max_num_generation_tokens": max(lengths),
            "vllm:request_params_n": params.n,
            "vllm:request_params_max_tokens": params.max_tokens,
            "vllm:request_queue_time_seconds": metrics.time_in_queue,
        }
        first_step, first = metrics.first_scheduled_time, metrics.first_token_time
        last = metrics.last_token_time
        if metrics.finished_time is not None:
            values["vllm:e2e_request_latency_seconds"] = metrics.finished_time - metrics.arrival_time
        if first_step is not None and first is not None:
            values["vllm:request_prefill_time_seconds"] = first - first_step
            if last is not None:
                values["vllm:request_decode_time_seconds"] = last - first
                values["vllm:request_inference_time_seconds"] = last - first_step
                if max(lengths) > 1:
                    per_token = (last - first) / (max(lengths) - 1)
                    values["vllm:request_time_per_output_token_seconds"] = per_token
        for name, value in values.items():
            if value is not None:
                self._histograms[name].add(value)

    def collect(self) -> Iterator[Metric]:
        """All metric families, for a scrape."""
        stats, config = self._stats(), self._cache_config
        yield self._gauge("vllm:num_requests_running", "Requests in the running queue.", stats.num_running_requests)
        yield self._gauge("vllm:num_requests_waiting", "Requests in the waiting queue.", stats.num_waiting_requests)
        yield self._gauge("treadle:num_requests_swapped", "Requests in the host tier.", stats.num_swapped_requests)
        yield self._gauge("vllm:kv_cache_usage_perc", "KV blocks in use; 1 is all of them.", stats.kv_cache_usage)
        yield self._counter(
            "vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", stats.num_prefix_queries
        )
        yield self._counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", stats.num_prefix_hits)
        yield self._counter(
            "vllm:prompt_tokens",
            "Prompt tokens, each once, whether computed or cached.",
            self._num_prompt_tokens + self._num_cached_tokens,
        )
        yield self._counter(
            "treadle:prompt_tokens_computed", "Prompt tokens computed, each once.", self._num_prompt_tokens
        )
        yield self._counter(
            "vllm:prompt_tokens_cached", "Prompt tokens taken from the prefix cache.", self._num_cached_tokens
        )
        yield self._counter(
            "treadle:recomputed_tokens", "Tokens computed again after a preemption.", self._num_recomputed_tokens
        )
        yield self._counter("vllm:generation_tokens", "Tokens generated.", self._num_generated_tokens)
        yield self._counter("vllm:num_preemptions", "Preemptions.", sum(self._preemptions.values()))
        yield self._by("vllm:request_success", "Requests that ended, by reason.", "finished_reason", self._finished)
        yield self._by("treadle:preemptions", "Preemptions by mode.", "mode", self._preemptions)
        yield self._by("treadle:steps", "Steps by kind.", "kind", self._steps)
        yield self._by(
            "treadle:refusals", "Steps in which the first waiting request was refused.", "reason", self._refusals
        )
        yield self._by("treadle:block_moves", "Blocks swapped and copied.", "move", self._block_moves)
        blocks = {state: stats.num_blocks[state] for state in ("free", "cached", "referenced")}
        yield self._by("treadle:kv_blocks", "KV blocks by state.", "state", blocks, GaugeMetricFamily)
        for name, histogram in self._histograms.items():
            text = HISTOGRAMS[name][0]
            yield histogram.family(name, text, self._labels)
            if name in OLDER_NAMES:
                yield histogram.family(OLDER_NAMES[name], text, self._labels)
        sizes = (config.block_size, config.num_blocks, config.num_host_blocks)
        labels = ("block_size", "num_gpu_blocks", "num_cpu_blocks")
        yield self._family(GaugeMetricFamily, "vllm:cache_config_info", "The KV pool.", labels, {sizes: 1})

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return self._family(GaugeMetricFamily, name, text, (), {(): value})

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return self._family(CounterMetricFamily, name, text, (), {(): value})

    def _by(
        self,
        name: str,
        text: str,
        label: str,
        values: Mapping[str, float],
        kind: type[CounterMetricFamily] | type[GaugeMetricFamily] = CounterMetricFamily,
    ) -> Metric:
        return self._family(kind, name, text, (label,), {(key,): value for key, value in list(values.items())})

    def _family(
        self,
        kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
        name: str,
        text: str,
        labels: Sequence[str],
        values: Mapping[tuple[object, ...], float],
    ) -> Metric:
        """A metric family with a value per combination of the labels beyond LABELS."""
        family = kind(name, text, labels=[*LABELS, *labels])
        for own, value in values.items():
            family.add_metric([*self._labels, *map(str, own)], value)
        return family
