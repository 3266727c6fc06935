"""The load generator's figures, compared with figures computed by hand and with numpy."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from treadle.loadgen.client import Result
from treadle.loadgen.report import percentile, render, summarize


def result(sent, tokens_at, ended, *, output_tokens=None, failure=None, error=None, late=0.0):
    count = len(tokens_at) if output_tokens is None else output_tokens
    return Result(
        sent=sent, late=late, tokens_at=tokens_at, ended=ended, prompt_tokens=10, cached_tokens=4,
        output_tokens=count, has_usage=True, failure=failure, error=error,
    )  # fmt: skip


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0.001, 1.0))
def test_percentiles_use_the_nearest_rank(values, share):
    assert percentile(values, share) == np.percentile(values, 100 * share, method="inverted_cdf")


def test_the_summary_equals_figures_computed_by_hand():
    results = [
        result(1.0, [1.5, 1.6, 1.7, 1.8], 1.9),  # ttft 500, tpot 100, e2e 900
        result(1.2, [1.3, 1.5], 1.5),  # ttft 100, tpot 200, e2e 300
        result(2.0, [3.0], 3.0),  # ttft 1000, no tpot
        result(2.5, [2.6, 2.9], 5.0, output_tokens=4),  # a chunk with several tokens: ttft 100, tpot 100, e2e 2500
        result(2.5, [2.6], 9.0, failure="HTTP 503", error="full", late=0.25),
    ]
    summary = summarize(results, {"ttft": 500.0, "tpot": 150.0})
    assert summary["requests"] == 5
    assert summary["failed"] == 1
    assert summary["failures"] == {"HTTP 503": {"full": 1}}
    assert summary["without_usage"] == 0
    assert summary["seconds"] == 4.0  # from 1.0 to 5.0: failed requests do not count
    assert summary["output_tokens"] == 11
    assert summary["prompt_tokens"] == 40
    assert summary["cached_tokens"] == 16
    assert summary["requests_per_s"] == 1.0
    assert summary["output_tokens_per_s"] == pytest.approx(11 / 4)
    assert summary["total_tokens_per_s"] == pytest.approx(51 / 4)
    assert summary["most_at_once"] == 3
    assert summary["ttft_ms"] == pytest.approx({"mean": 425, "p50": 100, "p90": 1000, "p99": 1000, "max": 1000})
    assert summary["tpot_ms"] == pytest.approx({"mean": 400 / 3, "p50": 100, "p90": 200, "p99": 200, "max": 200})
    assert summary["itl_ms"]["max"] == pytest.approx(300)
    assert summary["e2e_ms"]["max"] == pytest.approx(2500)
    assert summary["late_ms"]["max"] == pytest.approx(250)
    assert summary["goodput_requests"] == 2  # the first and the last: 200 ms exceeds the bound, and so does 1000
    assert summary["goodput_per_s"] == 0.5
    table = render(summary)
    for text in ("4 of 5 requests", "goodput     0.50", "ttft ≤ 500 ms", "failed 1×: HTTP 503\n    1× full", "TPOT"):
        assert text in table


def test_a_run_without_a_successful_request_has_a_summary():
    summary = summarize([result(1.0, [], 1.1, failure="no text", error="")], {})
    assert summary["requests_per_s"] == 0.0
    assert "0 of 1 requests" in render(summary)
    assert "goodput" not in render(summary)
    assert "0 of 0 requests" in render(summarize([], {}))
