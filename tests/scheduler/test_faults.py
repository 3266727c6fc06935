"""Faults found in other engines, one test each."""

import pytest

from treadle.core.errors import ConfigError, EngineError, InvalidRequestError
from treadle.scheduler import WaitReason
from treadle.testing.toy import ToyEngine, toy_continuation

B = 4


@pytest.mark.parametrize("policy", ["chunked", "phased"])
def test_a_lone_request_that_fills_the_pool(policy):
    engine = ToyEngine(num_blocks=8, block_size=B, max_model_len=32, scheduler=policy)
    prompt = list(range(20))
    engine.add("a", prompt, max_tokens=100)
    assert engine.run()["a"] == toy_continuation(prompt, 12)
    assert engine.finished["a"].sequences[0].finish_reason == "length"
    assert not any(report.preempted for report in engine.reports)


@pytest.mark.parametrize("policy", ["chunked", "phased"])
@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 8, 16, 64])
def test_prompts_around_block_edges_with_every_chunk_size(policy, chunk):
    engine = ToyEngine(num_blocks=64, block_size=B, max_num_seqs=1, max_num_batched_tokens=chunk, scheduler=policy)
    expected = {}
    for length in [k * B + d for k in (1, 2, 3, 4) for d in (-1, 0, 1)]:
        prompt = [length, *range(length - 1)]
        engine.add(f"p{length}", prompt, max_tokens=6)
        expected[f"p{length}"] = toy_continuation(prompt, 6)
    assert engine.run() == expected


def test_prompts_at_the_length_limit():
    engine = ToyEngine(num_blocks=8, block_size=B, max_model_len=32)
    with pytest.raises(InvalidRequestError, match="has 32 tokens, and at most 31 leave room"):
        engine.add("whole", list(range(32)))
    assert engine.scheduler.num_unfinished_requests == 0
    engine.add("one less", list(range(31)))
    assert engine.run() == {"one less": toy_continuation(range(31), 1)}


def test_a_pool_too_small_for_max_model_len_is_refused():
    with pytest.raises(
        ConfigError, match="at most the 32 tokens that the KV pool holds .8 blocks of 4 tokens., got 33"
    ):
        ToyEngine(num_blocks=8, block_size=B, max_model_len=33)


def test_a_token_budget_below_max_num_seqs_is_refused():
    with pytest.raises(ConfigError, match=r"max_num_seqs \(8\).*got 7"):
        ToyEngine(max_num_seqs=8, max_num_batched_tokens=7)


def test_the_error_for_an_unknown_policy_names_it():
    with pytest.raises(
        ConfigError, match="unknown phase policy 'fastest'; known: chunked, phased, prefill-first, three-phase"
    ):
        ToyEngine(scheduler="fastest")


@pytest.mark.parametrize("limit", [1, 3, 8])
def test_endless_arrivals_under_phased_delay_decodes_by_a_bounded_number_of_steps(limit):
    engine = ToyEngine(
        num_blocks=500, block_size=B, scheduler="phased", max_num_seqs=8, max_num_batched_tokens=16,
        max_model_len=200, max_consecutive_prefills=limit,
    )  # fmt: skip
    engine.add("victim", [1, 2, 3], max_tokens=20)
    engine.step()
    gaps, gap = [], 0
    for i in range(400):
        # Requests of one token free their seats at once, so that there is always a prompt to start.
        engine.add(f"new {i}", [i % 50] * 12, max_tokens=1)
        report = engine.step()
        if report.plan.num_decodes:
            gaps.append(gap)
            gap = 0
        else:
            gap += 1
        if "victim" in engine.finished:
            break
    assert engine.finished["victim"].sequences[0].output_token_ids == toy_continuation([1, 2, 3], 20)
    assert max(gaps) == limit


@pytest.mark.parametrize("policy", ["chunked", "phased"])
def test_every_request_ends_under_endless_arrivals(policy):
    engine = ToyEngine(num_blocks=24, block_size=B, scheduler=policy, max_num_seqs=4, max_model_len=64)
    for i in range(300):
        engine.add(f"r{i}", [i % 50] * (1 + i * 7 % 30), max_tokens=1 + i * 5 % 12)
        engine.step()
        engine.step()
    last_admitted = [r.arrival_number for r in engine.finished.values()]
    # First come, first served: no request finishes far ahead of one that arrived much earlier.
    waiting = [r.arrival_number for r in engine.scheduler.unfinished_requests()]
    assert min(waiting) > max(last_admitted) - 40
    engine.run()
    assert len(engine.finished) == 300


def test_the_victim_is_last_in_rank_and_returns_to_its_place_in_the_queue():
    engine = ToyEngine(num_blocks=6, block_size=B, max_model_len=24, max_num_seqs=4, admission_headroom=0)
    for name in "abcd":
        engine.add(name, [ord(name) % 50] * 3, max_tokens=9)
    victims = []
    expected = {name: toy_continuation([ord(name) % 50] * 3, 9) for name in "abcd"}
    while engine.scheduler.num_unfinished_requests:
        report = engine.step()
        victims += [(p.request_id, p.for_request_id) for p in report.preempted]
        waiting = [r.request_id for r in engine.scheduler.waiting]
        assert waiting == sorted(waiting)
    assert victims[0][0] == "d"
    assert all(victim >= cause for victim, cause in victims)
    assert "a" not in {victim for victim, _ in victims}
    assert engine.run() == expected


def test_a_step_that_preempts_admits_no_request():
    engine = ToyEngine(num_blocks=6, block_size=B, max_model_len=24, max_num_seqs=6, admission_headroom=0)
    for i in range(8):
        engine.add(f"r{i}", [i] * 3, max_tokens=10)
    while engine.scheduler.num_unfinished_requests:
        first_in_line = {r.request_id for r in engine.scheduler.waiting}
        report = engine.step()
        if report.preempted:
            assert not {s.request_id for s in engine.prefills(report)} & first_in_line
            assert report.refusals[0].reason is WaitReason.PREEMPTION_IN_STEP


@pytest.mark.parametrize("policy", ["chunked", "three-phase", "prefill-first", "phased"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("headroom", [0, 1])
def test_requests_are_rarely_preempted_in_a_pool_for_three_of_24(policy, mode, headroom):
    engine = ToyEngine(
        num_blocks=24, block_size=B, max_model_len=48, max_num_seqs=24, max_num_batched_tokens=48, scheduler=policy,
        num_host_blocks=60, preemption_mode=mode, admission_headroom=headroom,
    )  # fmt: skip
    for i in range(24):
        engine.add(f"r{i}", [i] * (8 + i % 9), max_tokens=16 + i % 5)
    ran_since = {}
    while engine.scheduler.num_unfinished_requests:
        report = engine.step()
        for p in report.preempted:
            # A request runs at least one step between two preemptions.
            assert ran_since.get(p.request_id), p
            ran_since[p.request_id] = False
        for s in engine.prefills(report):
            ran_since[s.request_id] = True
        for name in report.swapped_in:
            ran_since[name] = True
    finished = engine.finished.values()
    assert sum(r.metrics.num_preemptions for r in finished) / len(finished) < 3


def test_recompute_after_a_hundred_outputs_in_chunks_of_eight():
    engine = ToyEngine(
        num_blocks=40, block_size=B, max_model_len=160, max_num_seqs=2, max_num_batched_tokens=8,
        enable_prefix_caching=False, admission_headroom=0,
    )  # fmt: skip
    engine.add("old", [1, 2], max_tokens=150)
    engine.add("young", [1, 2, 3], max_tokens=150)
    tokens = engine.run()
    assert tokens == {"old": toy_continuation([1, 2], 150), "young": toy_continuation([1, 2, 3], 150)}
    assert engine.finished["young"].metrics.num_preemptions == 1
    counts = [s.count for s in engine.prefills() if s.request_id == "young" and s.start > 0]
    assert counts
    assert max(counts) <= 8


def test_schedule_requires_the_result_of_the_previous_plan():
    engine = ToyEngine()
    engine.add("a", [1])
    plan = engine.scheduler.schedule()
    with pytest.raises(EngineError, match="before update"):
        engine.scheduler.schedule()
    engine.scheduler.update(plan, engine.runner.execute(plan))
    with pytest.raises(EngineError, match="not the one being executed"):
        engine.scheduler.update(plan, engine.runner.execute(plan))


def test_a_request_id_in_use_is_refused():
    engine = ToyEngine()
    engine.add("a", [1])
    with pytest.raises(InvalidRequestError, match="'a' is already in use"):
        engine.add("a", [2])


def test_unknown_request_ids_are_ignored():
    engine = ToyEngine()
    engine.scheduler.abort("nobody")
    assert engine.scheduler.take_finished() == []


def test_more_stop_ids_than_a_row_holds():
    engine = ToyEngine()
    expected = toy_continuation([1, 2], 40, set(range(20)))
    engine.add("a", [1, 2], max_tokens=40, stop_ids=range(20))
    engine.add("b", [1, 2], max_tokens=40, stop_ids=[expected[-1]])
    tokens = engine.run()
    assert tokens["a"] == expected
    assert engine.finished["a"].sequences[0].finish_reason == "stop"
    assert engine.finished["a"].sequences[0].stop_reason == expected[-1]


def test_the_report_gives_the_reason_for_waiting():
    engine = ToyEngine(num_blocks=4, block_size=B, max_model_len=16, max_num_seqs=4, max_num_batched_tokens=4)
    engine.add("a", [1] * 4, max_tokens=9)
    engine.add("b", [2] * 15, max_tokens=1)
    assert engine.step().refusals[0].reason is WaitReason.NO_TOKEN_BUDGET
    report = engine.step()
    assert [(r.request_id, r.reason) for r in report.refusals] == [("b", WaitReason.NO_FREE_BLOCKS)]


def test_the_same_arrivals_give_the_same_plans():
    def trace():
        engine = ToyEngine(num_blocks=12, block_size=B, max_model_len=48, scheduler="chunked")
        for i in range(30):
            engine.add(f"r{i}", [i % 7] * (1 + i * 11 % 30), max_tokens=1 + i * 3 % 15)
            engine.step()
        engine.run()
        return [(r.details.ran, r.preempted, r.refusals, r.plan.num_batched_tokens) for r in engine.reports]

    assert trace() == trace()


def test_a_request_can_finish_in_its_prefill_step():
    engine = ToyEngine()
    engine.add("a", list(range(10)), max_tokens=1)
    assert engine.run() == {"a": toy_continuation(range(10), 1)}
    assert len(engine.plans) == 1
    metrics = engine.finished["a"].metrics
    assert metrics.first_token_time == metrics.finished_time


def test_the_toy_runner_detects_a_lost_block():
    """The tests above are only meaningful if a wrong block changes the tokens."""
    engine = ToyEngine(num_blocks=8, block_size=B, max_model_len=32)
    engine.add("a", list(range(10)), max_tokens=8)
    engine.step()
    tables = engine.runner.table.block_tables
    tables[0, [0, 1]] = tables[0, [1, 0]]
    assert engine.run()["a"] != toy_continuation(range(10), 8)
