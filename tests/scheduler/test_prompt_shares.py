"""Prompts share the tokens of a step by rank, and a long prompt leaves some of them to the others."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from support.examples import examples
from treadle.core.errors import ConfigError
from treadle.scheduler import WaitReason
from treadle.testing.toy import ToyEngine, toy_continuation

B = 4


def prefills(report):
    return report.details.ran[: report.plan.num_prefills]


def prompt_tokens(report, name):
    return sum(s.count for s in prefills(report) if s.request_id == name)


@pytest.mark.parametrize("policy", ["chunked", "phased"])
def test_a_prompt_of_250_chunks_does_not_delay_twenty_short_ones(policy):
    engine = ToyEngine(
        num_blocks=1200,
        block_size=B,
        scheduler=policy,
        max_num_seqs=32,
        max_num_batched_tokens=32,
        max_model_len=4400,
    )
    long = [i % 50 for i in range(4000)]
    engine.add("long", long, 2)
    engine.step()
    for i in range(20):
        engine.add(f"short {i}", [i] * 8, 3)
    # 160 tokens, which get half of the prompt tokens of each step.
    for _ in range(12):
        engine.step()
    started = {s.request_id for s in engine.prefills()}
    assert started == {"long", *(f"short {i}" for i in range(20))}
    assert all(prompt_tokens(r, "long") >= 8 for r in engine.reports if r.plan.num_prefills)
    # The long prompt, alone again, gets the whole step.
    while len(engine.finished) < 20:
        engine.step()
    while "long" not in engine.finished:
        report = engine.step()
        computed = sum(prompt_tokens(p, "long") for p in engine.reports)
        assert prompt_tokens(report, "long") == 32 or computed == 4000
    assert engine.outputs("long") == [toy_continuation(long, 2)]


def test_without_a_threshold_the_first_prompt_takes_the_whole_budget():
    engine = ToyEngine(max_num_batched_tokens=16, long_prefill_token_threshold=0)
    engine.add("long", list(range(50)), 2)
    engine.add("short", [1, 2], 2)
    for count in (16, 16, 16):
        report = engine.step()
        assert prompt_tokens(report, "long") == count
    report = engine.step()
    assert (prompt_tokens(report, "long"), prompt_tokens(report, "short")) == (2, 2)


def test_the_threshold_limits_the_share_of_a_long_prompt():
    engine = ToyEngine(max_num_batched_tokens=32, long_prefill_token_threshold=4)
    engine.add("long", list(range(50)), 2)
    for i in range(4):
        engine.add(f"long too {i}", [i] * 5, 2)
        engine.add(f"short {i}", [i] * 4, 2)
    report = engine.step()
    assert [prompt_tokens(report, f"short {i}") for i in range(4)] == [4] * 4
    # The first long prompt takes the rest of the budget.
    assert prompt_tokens(report, "long") == 16
    with pytest.raises(ConfigError, match="long_prefill_token_threshold: must be at least 0, got -1"):
        ToyEngine(long_prefill_token_threshold=-1)


def test_long_prompts_alone_use_the_whole_budget():
    engine = ToyEngine(num_blocks=200, max_num_batched_tokens=16, max_model_len=100)
    for i in range(12):
        engine.add(f"r{i}", [i] * 21, 1)
    while engine.scheduler.num_unfinished_requests:
        engine.step()
    assert [plan.num_batched_tokens for plan in engine.plans] == [16] * 15 + [12]
    starts = list(dict.fromkeys(s.request_id for s in engine.prefills()))
    assert starts == [f"r{i}" for i in range(12)]


def test_cached_tokens_do_not_count_towards_a_long_prompt():
    engine = ToyEngine(num_blocks=300, max_num_batched_tokens=16, max_model_len=400)
    chat = list(range(40))
    engine.add("chat", chat, 1)
    engine.run()
    engine.add("long", [1] * 300, 1)
    engine.step()
    engine.add("chat again", [*chat, 7, 8], 1)
    report = engine.step()
    assert prompt_tokens(report, "chat again") == 2


@pytest.mark.parametrize("order", ["priority", "shortest-first", "deadline"])
def test_a_better_prompt_is_computed_before_the_rest_of_a_worse_one(order):
    engine = ToyEngine(num_blocks=200, max_num_batched_tokens=16, max_model_len=300, order=order)
    engine.add("worse", [1] * 200, 2, priority=5, deadline=90.0)
    engine.step()
    engine.add("better", [2] * 60, 2, priority=1, deadline=50.0)
    while engine.scheduler.find("better"):
        report = engine.step()
        # Half of the step goes to the prompts behind a long prompt, as long as it is long.
        left = 60 - sum(prompt_tokens(p, "better") for p in engine.reports)
        assert prompt_tokens(report, "better") >= 8 or left <= 0
    engine.run()


def test_a_partly_computed_prompt_ages():
    """Better requests arrive without end; the age limit lets the worst one continue, which has a seat already."""
    engine = ToyEngine(
        num_blocks=300, max_num_batched_tokens=8, max_model_len=200, order="priority", age_limit_s=30.0
    )
    engine.add("victim", [1] * 60, 2, priority=9)
    engine.step()
    for i in range(200):
        if "victim" in engine.finished:
            break
        engine.add(f"new {i}", [2, i % 50] * 4, 1, priority=0)
        engine.step()
    assert not any(prompt_tokens(report, "victim") for report in engine.reports[1:30])
    assert 30.0 <= engine.finished["victim"].metrics.first_token_time <= 30.0 + 60 / 4 + 2


def test_ageing_does_not_change_the_order_of_fcfs():
    """A preempted request stays ahead of all later arrivals, even of those that have waited longer since it ran."""
    engine = ToyEngine(
        num_blocks=8, block_size=B, max_model_len=32, max_num_seqs=2, admission_headroom=0, age_limit_s=5.0
    )
    for i in range(6):
        engine.add(f"r{i}", [i] * 5, 20)
    finished = []
    while engine.scheduler.num_unfinished_requests:
        engine.step()
        finished += [name for name in engine.finished if name not in finished]
    assert sum(len(report.preempted) for report in engine.reports) > 2
    assert finished == [f"r{i}" for i in range(6)]


ARRIVAL = st.tuples(
    st.integers(1, 50),  # prompt length
    st.integers(1, 12),  # max_tokens
    st.integers(0, 3),  # priority
    st.integers(0, 4),  # steps before the next arrival
)


@examples(400)
@given(
    policy=st.sampled_from(["chunked", "phased"]),
    order=st.sampled_from(["fcfs", "priority", "shortest-first", "deadline"]),
    threshold=st.sampled_from([None, 0, 1, 5, 12]),
    budget=st.integers(6, 24),
    pool=st.sampled_from([30, 100]),
    age_limit_s=st.sampled_from([None, 12.0]),
    arrivals=st.lists(ARRIVAL, min_size=3, max_size=14),
)
def test_prompts_are_scheduled_by_rank_and_long_ones_take_at_most_their_share(
    policy, order, threshold, budget, pool, age_limit_s, arrivals
):
    engine = ToyEngine(
        num_blocks=pool, block_size=B, scheduler=policy, order=order, max_model_len=70, max_num_seqs=6,
        max_num_batched_tokens=budget, age_limit_s=age_limit_s, long_prefill_token_threshold=threshold,
    )  # fmt: skip
    scheduler = engine.scheduler
    threshold = budget if threshold is None else threshold

    def is_long(seq, start):
        return 0 < threshold < seq.num_tokens - start

    def check(report):
        plan = report.plan
        if not plan.num_prefills:
            return  # a step of decodes only
        batch = scheduler.batch
        prompts = [(scheduler.find(s.request_id).sequences[s.index], s) for s in prefills(report)]
        prompt_budget = budget - plan.num_decodes
        left_out = [r.request_id for r in report.refusals if r.reason is WaitReason.NO_TOKEN_BUDGET]
        waiting = [scheduler.find(name).sequences[0] for name in left_out]
        hungry = [seq for seq in batch.prefilling_sequences() if all(seq is not other for other, _ in prompts)]
        for seq in waiting + hungry:
            if is_long(seq, seq.num_computed_tokens):
                continue
            if policy == "phased" and seq in hungry:
                continue  # a prompt that has to be cut may have to be the first of the step
            # It got no token, so every token went to better requests.
            better = sum(s.count for other, s in prompts if other.request.rank < seq.request.rank)
            worse = [(other, s) for other, s in prompts if other.request.rank > seq.request.rank]
            assert not worse
            assert better == prompt_budget
        left_out = waiting if policy == "phased" else waiting + hungry
        if any(not is_long(seq, seq.num_computed_tokens) for seq in left_out):
            share = min(threshold, -(-prompt_budget // 2))
            assert all(s.count <= share for other, s in prompts if is_long(other, s.start))
        if policy == "chunked" and plan.num_batched_tokens < budget:
            assert not hungry
            assert all(s.start + s.count == seq.num_tokens for seq, s in prompts)

    def step():
        if scheduler.num_unfinished_requests:
            engine.step(before_update=check)

    for i, (length, max_tokens, priority, pause) in enumerate(arrivals):
        engine.add(
            f"r{i}",
            [(i * 7 + k) % 50 for k in range(length)],
            max_tokens,
            priority=priority,
            deadline=20.0 * priority,
        )
        for _ in range(pause):
            step()
    for _ in range(5000):
        step()
    assert not scheduler.num_unfinished_requests
    assert engine.run() == {
        f"r{i}": toy_continuation([(i * 7 + k) % 50 for k in range(length)], max_tokens, max_model_len=70)
        for i, (length, max_tokens, _, _) in enumerate(arrivals)
    }
