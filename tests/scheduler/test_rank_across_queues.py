"""One rank order across the queues: waiting requests, swapped requests and partly computed prompts."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from support.examples import examples
from treadle.core.lora import LoRARequest
from treadle.scheduler import WaitReason
from treadle.testing.toy import ToyEngine, toy_continuation

B = 4
POLICIES = ["chunked", "three-phase", "prefill-first", "phased"]
ORDERS = ["fcfs", "priority", "shortest-first", "fair", "deadline"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_swapped_request_waits_for_a_better_waiting_request(policy):
    """The waiting request needs a seat of the best one; the swapped one would fit now, but be preempted again."""
    engine = ToyEngine(
        num_blocks=9, block_size=B, num_host_blocks=40, order="priority", preemption_mode="swap", max_model_len=36,
        scheduler=policy, max_num_seqs=3, admission_headroom=0,
    )  # fmt: skip
    engine.add("best", [1] * 10, 24, priority=0)
    engine.add("ends soon", [2] * 12, 4, priority=4)
    engine.add("worst", [3] * 7, 9, priority=5)
    while not engine.scheduler.swapped:
        engine.step()
    engine.add("three seats", [4] * 3, 3, n=3, priority=1)
    while "ends soon" not in engine.finished:
        engine.step()
    assert engine.scheduler.kv.num_available_blocks > 3
    while engine.scheduler.num_unfinished_requests:
        report = engine.step()
        assert "three seats" in engine.finished or "worst" not in report.swapped_in
    assert engine.finished["worst"].metrics.num_preemptions == 1
    assert engine.outputs("worst") == [toy_continuation([3] * 7, 9)]
    assert engine.outputs("three seats") == [toy_continuation([4] * 3, 3, index=i) for i in range(3)]


ARRIVAL = st.tuples(
    st.integers(1, 40),  # prompt length
    st.integers(1, 30),  # max_tokens
    st.integers(1, 3),  # n
    st.integers(0, 3),  # priority
    st.sampled_from([0, 0, 0, 1, 2]),  # adapter
    st.integers(0, 3),  # steps before the next arrival
)


@examples(400)
@given(
    policy=st.sampled_from(POLICIES),
    order=st.sampled_from(ORDERS),
    pool=st.sampled_from([18, 24, 40]),
    headroom=st.integers(0, 1),
    age_limit_s=st.sampled_from([None, 8.0]),
    arrivals=st.lists(ARRIVAL, min_size=3, max_size=14),
)
def test_no_request_is_resumed_before_a_better_waiting_request(policy, order, pool, headroom, age_limit_s, arrivals):
    engine = ToyEngine(
        num_blocks=pool, block_size=B, num_host_blocks=60, scheduler=policy, order=order, preemption_mode="swap",
        max_model_len=60, max_num_seqs=6, max_num_batched_tokens=20, admission_headroom=headroom,
        age_limit_s=age_limit_s,
    )  # fmt: skip
    scheduler = engine.scheduler

    def check(report):
        back = [scheduler.find(name) for name in report.swapped_in]
        adapters = {r.lora.lora_int_id for r in scheduler.batch.running_requests() if r.lora is not None}
        for waiting in scheduler.waiting:
            is_passed_over = waiting.lora is not None and waiting.lora.lora_int_id not in adapters
            assert is_passed_over or all(request.rank < waiting.rank for request in back)
        first = scheduler.swapped.first()
        for refusal in report.refusals:
            if refusal.reason is WaitReason.BEHIND_WAITING_REQUEST:
                assert refusal.request_id == first.request_id or first.lora is not None

    for i, (length, max_tokens, n, priority, adapter, pause) in enumerate(arrivals):
        engine.add(
            f"r{i}", [(i * 7 + k) % 50 for k in range(length)], max_tokens, n=n, priority=priority,
            tenant="xy"[i % 2], deadline=float(priority * 20), lora=LoRARequest(f"a{adapter}", adapter) if adapter else None,
        )  # fmt: skip
        for _ in range(pause):
            if scheduler.num_unfinished_requests:
                engine.step(before_update=check)
    for _ in range(5000):
        if scheduler.num_unfinished_requests:
            engine.step(before_update=check)
    assert not scheduler.num_unfinished_requests
