"""The metrics against an independent count of every token."""

import math

import pytest

from treadle.scheduler import WaitReason
from treadle.server.metrics import Metrics
from treadle.testing.toy import ToyEngine


class Account:
    """Checks all sequences after every step and records when each one grew."""

    def __init__(self, requests):
        self.requests, self.last, self.gaps, self.first = requests, {}, [], []

    def look(self, now):
        for request in self.requests:
            grown = [seq for seq in request.sequences if seq.num_output_tokens > self.last.get(seq, (0, 0))[0]]
            if grown and not any(seq in self.last for seq in request.sequences):
                self.first.append(now - request.arrival_time)
            for seq in grown:
                if seq in self.last:
                    self.gaps.append(now - self.last[seq][1])
                self.last[seq] = (seq.num_output_tokens, now)


@pytest.mark.parametrize("policy", ["chunked", "prefill-first", "three-phase"])
@pytest.mark.parametrize("num_host_blocks", [0, 20])
def test_latencies_are_from_token_to_token(policy, num_host_blocks):
    engine = ToyEngine(num_blocks=12, num_host_blocks=num_host_blocks, scheduler=policy, max_model_len=40)
    metrics = Metrics(engine.scheduler.stats, engine.scheduler.cache_config, "toy")
    engine.observers.append(metrics)
    account = Account(
        [engine.add(str(i), [10 * i + j for j in range(6)], max_tokens=20, n=1 + (i == 1)) for i in range(4)]
    )
    for i in range(400):
        if not engine.scheduler.num_unfinished_requests:
            break
        if i == 8:  # a prompt that comes while others decode makes them wait under the phased policies
            account.requests.append(engine.add("late", list(range(9)), max_tokens=3))
        now = engine.clock.now()
        engine.step()
        account.look(now)
    values = {sample.name: sample.value for family in metrics.collect() for sample in family.samples}
    reasons = {s.labels["reason"] for family in metrics.collect() for s in family.samples if "reason" in s.labels}
    assert "no_free_blocks" in reasons
    assert reasons <= {reason.value for reason in WaitReason}
    assert values["vllm:num_preemptions_total"] > 0
    assert values["vllm:prompt_tokens_total"] == sum(len(r.prompt_token_ids) for r in account.requests)
    assert (
        values["treadle:prompt_tokens_computed_total"] + values["vllm:prompt_tokens_cached_total"]
        == (values["vllm:prompt_tokens_total"])
    )
    assert values["treadle:recomputed_tokens_total"] > 0 or num_host_blocks
    assert max(account.gaps) > 2
    assert values["vllm:inter_token_latency_seconds_count"] == len(account.gaps)
    assert values["vllm:inter_token_latency_seconds_sum"] == pytest.approx(math.fsum(account.gaps))
    assert values["vllm:time_to_first_token_seconds_count"] == len(account.first) == 5
    assert values["vllm:time_to_first_token_seconds_sum"] == pytest.approx(math.fsum(account.first))
    ends = [request.metrics.last_token_time for request in account.requests]
    assert ends == [max(account.last[seq][1] for seq in request.sequences) for request in account.requests]
