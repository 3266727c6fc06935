"""Requests with several sequences: sharing, copy-on-write, swap, beams, and children that end one by one."""

import pytest

from treadle.core.request import FinishReason
from treadle.scheduler import check_invariants
from treadle.testing.toy import ToyEngine, toy_beam_search, toy_continuation

B = 4
PROMPT = list(range(10))


def children(prompt, count, max_tokens, **kwargs):
    return [toy_continuation(prompt, max_tokens, index=i, **kwargs) for i in range(count)]


def test_the_prompt_is_computed_once_and_its_blocks_are_shared():
    engine = ToyEngine()
    engine.add("a", PROMPT, 12, n=4)
    report = engine.step()
    assert [(s.count, s.num_samples) for s in engine.prefills(report)] == [(10, 4)]
    kv = engine.scheduler.kv
    assert kv.pool.num_blocks - kv.num_available_blocks == 3
    assert kv.pool.ref_counts.max() == 4
    report = engine.step()
    # The third block is half full: three children copy it, the last one keeps it.
    assert len(report.plan.moves.copy) == 3
    assert len({source for source, _ in report.plan.moves.copy}) == 1
    assert kv.pool.num_blocks - kv.num_available_blocks == 6
    engine.run()
    assert engine.outputs("a") == children(PROMPT, 4, 12)
    assert sum(s.count for s in engine.prefills()) == 10


def test_a_fork_at_a_block_edge_copies_nothing():
    engine = ToyEngine()
    engine.add("a", PROMPT[:8], 12, n=3)
    engine.run()
    assert not any(plan.moves.copy for plan in engine.plans)
    assert engine.outputs("a") == children(PROMPT[:8], 3, 12)


def test_a_group_takes_all_its_seats_at_admission_and_frees_them_one_by_one():
    engine = ToyEngine(max_num_seqs=4, max_num_batched_tokens=4)
    engine.add("group", PROMPT, 30, n=3)
    engine.add("a", [1], 30)
    engine.add("b", [2], 30)
    engine.step()
    engine.step()
    engine.step()
    running = {seq.request.request_id for seq in engine.scheduler.batch.running_sequences()}
    assert running == {"group", "a"}
    group = engine.scheduler.find("group")
    engine.step()
    engine.scheduler.finish_sequence(group.sequences[1], FinishReason.STOP, "word")
    engine.step()
    assert "b" in {seq.request.request_id for seq in engine.scheduler.batch.running_sequences()}
    engine.run()
    whole = children(PROMPT, 3, 30)
    assert engine.outputs("group")[0] == whole[0]
    assert engine.outputs("group")[2] == whole[2]
    assert engine.outputs("group")[1] == whole[1][: len(engine.outputs("group")[1])]
    assert [seq.stop_reason for seq in engine.finished["group"].sequences] == [None, "word", None]


@pytest.mark.parametrize("mode", ["auto", "recompute", "swap"])
@pytest.mark.parametrize("policy", ["chunked", "three-phase", "prefill-first", "phased"])
@pytest.mark.parametrize("host", [0, 40])
def test_groups_in_a_small_pool_keep_their_outputs(mode, policy, host):
    """Without swap space, groups are recomputed: the prompt once, then each child's own output."""
    engine = ToyEngine(
        num_blocks=30, block_size=B, num_host_blocks=host, max_model_len=48, scheduler=policy, preemption_mode=mode,
        admission_headroom=0,
    )  # fmt: skip
    for i in range(6):
        engine.add(f"r{i}", [*PROMPT, i], 20, n=4 if i % 2 else 1)
    engine.run()
    for i in range(6):
        assert engine.outputs(f"r{i}") == children([*PROMPT, i], 4 if i % 2 else 1, 20)
    modes = {p.mode.value for report in engine.reports for p in report.preempted}
    assert modes
    if mode == "recompute" or not host:
        assert modes == {"recompute"}
    assert not any(plan.moves.swap_in and plan.moves.swap_out for plan in engine.plans)


def test_a_recomputed_group_computes_its_prompt_once():
    engine = ToyEngine(
        num_blocks=19, block_size=B, max_model_len=48, enable_prefix_caching=False, admission_headroom=0
    )
    engine.add("first", PROMPT, 30)
    engine.add("group", [*PROMPT, *PROMPT], 12, n=4)
    engine.run()
    assert engine.finished["group"].metrics.num_preemptions >= 1
    assert engine.outputs("group") == children([*PROMPT, *PROMPT], 4, 12)
    preempted_in = next(report.plan.step for report in engine.reports if report.preempted)
    later = [s for report in engine.reports[preempted_in:] for s in engine.prefills(report)]
    starts = [s.start for s in later if s.request_id == "group"]
    assert starts.count(0) == 1  # one child computes the prompt's full blocks, the others begin after them


@pytest.mark.parametrize("mode", ["auto", "swap"])
def test_abort_of_a_group_while_swapped(mode):
    engine = ToyEngine(
        num_blocks=20, block_size=B, num_host_blocks=40, max_model_len=48, preemption_mode=mode, admission_headroom=0
    )
    engine.add("first", PROMPT, 34)
    engine.add("group", [1, *PROMPT], 20, n=3)
    while "group" not in [r.request_id for r in engine.scheduler.swapped]:
        engine.step()
    host = engine.scheduler.kv.host_pool
    assert host.num_available < host.num_blocks
    engine.scheduler.abort("group")
    assert host.num_available == host.num_blocks
    engine.run()
    assert engine.outputs("first") == children(PROMPT, 1, 34)
    assert {seq.finish_reason for seq in engine.finished["group"].sequences} == {FinishReason.ABORT}


def test_a_group_too_large_for_the_pool_ends_with_an_error_and_its_partial_output():
    engine = ToyEngine(num_blocks=12, block_size=B, max_model_len=48)
    engine.add("group", PROMPT, 38, n=4)
    engine.add("after", PROMPT, 5)
    engine.run()
    group = engine.finished["group"]
    assert "its 4 sequences need more than the 12 blocks of the KV cache" in group.error
    whole = children(PROMPT, 4, 38)
    assert all(out and out == w[: len(out)] for out, w in zip(engine.outputs("group"), whole, strict=True))
    assert engine.outputs("after") == children(PROMPT, 1, 5)
    assert any("group" in report.ignored for report in engine.reports)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
def test_beam_search_equals_brute_force(width, early_stopping, length_penalty):
    search = {"early_stopping": early_stopping, "length_penalty": length_penalty}
    for i in range(6):
        engine = ToyEngine()
        stop_ids = [3 * i, 3 * i + 1, 40]
        engine.add("a", [*PROMPT, i], 12, stop_ids, width, params={"use_beam_search": True, **search})
        engine.run()
        assert engine.outputs("a") == toy_beam_search([*PROMPT, i], width, 12, stop_ids=frozenset(stop_ids), **search)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption_does_not_change_beam_search(mode):
    engine = ToyEngine(
        num_blocks=24, block_size=B, num_host_blocks=60, max_model_len=48, preemption_mode=mode, admission_headroom=0
    )
    engine.add("plain", PROMPT, 38)
    for i in range(3):
        engine.add(f"beams {i}", [*PROMPT, i], 20, n=3, params={"use_beam_search": True})
    engine.run()
    for i in range(3):
        assert engine.outputs(f"beams {i}") == toy_beam_search([*PROMPT, i], 3, 20)
    assert sum(r.metrics.num_preemptions for r in engine.finished.values())


def test_drafts_are_verified_and_their_unused_blocks_freed():
    engine = ToyEngine(num_lookahead_slots=5, max_num_batched_tokens=48)
    engine.add("a", PROMPT, 40)
    engine.add("b", [*PROMPT, 1], 40, n=2)
    kv = engine.scheduler.kv
    steps = 0
    while engine.scheduler.num_unfinished_requests:
        engine.step()
        steps += 1
        for seq in engine.scheduler.batch.running_sequences():
            # The unused blocks of rejected drafts are free again: no block beyond the known tokens is held.
            assert len(kv.block_table(seq)) <= kv.blocks_for(seq.num_tokens)
    assert engine.outputs("a") == children(PROMPT, 1, 40)
    assert engine.outputs("b") == children([*PROMPT, 1], 2, 40)
    assert steps < 40  # drafts were accepted
    assert sum(len(plan.drafts) for plan in engine.plans) > 60


def test_drafts_count_as_tokens():
    engine = ToyEngine(num_lookahead_slots=3, max_num_batched_tokens=8)
    engine.add("a", PROMPT[:4], 8)
    engine.step()
    assert engine.step().plan.counts.tolist() == [4]
    engine.add("b", PROMPT, 8)
    report = engine.step()
    assert report.plan.num_batched_tokens == 8


@pytest.mark.parametrize("num_blocks", [4, 5, 9])
def test_drafts_never_end_or_preempt_a_request_that_fits_without_them(num_blocks):
    """Without drafts, the requests fill the pool to the last block."""
    engine = ToyEngine(
        num_blocks=num_blocks, block_size=B, num_lookahead_slots=5, max_num_batched_tokens=48, max_num_seqs=2,
        admission_headroom=0, enable_prefix_caching=False,
    )  # fmt: skip
    longest = num_blocks * B
    engine.add("whole pool", PROMPT, longest - len(PROMPT))
    engine.run()
    assert engine.outputs("whole pool") == children(PROMPT, 1, longest - len(PROMPT))
    half = num_blocks // 2 * B
    for name in "ab":
        engine.add(name, [1, 2, ord(name) % 50], half - 3)
    engine.run()
    for name in "ab":
        assert engine.outputs(name) == children([1, 2, ord(name) % 50], 1, half - 3)
    assert not any(report.preempted or report.ignored for report in engine.reports)


@pytest.mark.parametrize("direction", ["swap_out", "swap_in"])
def test_a_failed_step_fails_its_requests_and_recomputes_swapped_ones(direction):
    engine = ToyEngine(
        num_blocks=20,
        block_size=B,
        num_host_blocks=60,
        max_model_len=48,
        preemption_mode="swap",
        admission_headroom=0,
    )
    for i in range(6):
        engine.add(f"r{i}", [*PROMPT, i], 20, n=1 + i % 2)
    failed = swapped = None
    while engine.scheduler.num_unfinished_requests:
        plan = engine.scheduler.schedule()
        report = engine.scheduler.report
        if failed is None and getattr(plan.moves, direction):
            ran = [s.request_id for s in report.details.ran]
            swapped = {p.request_id for p in report.preempted} | set(report.swapped_in)
            failed = set(ran) - swapped
            # The runner may have executed a part of the step, so the content of blocks that it was to move is undefined.
            for _, target in plan.moves.swap_in:
                engine.runner.slots[target] = -1
            for _, target in plan.moves.swap_out:
                engine.runner.host_slots[target] = -1
            engine.scheduler.fail(plan, "broken")
        else:
            engine.scheduler.update(plan, engine.runner.execute(plan))
        check_invariants(engine.scheduler)
        engine.collect()
    assert swapped
    assert failed or direction == "swap_in"
    for i in range(6):
        name, whole = f"r{i}", children([*PROMPT, i], 1 + i % 2, 20)
        if name in failed:
            assert engine.finished[name].error == "broken"
            assert all(out == w[: len(out)] for out, w in zip(engine.outputs(name), whole, strict=False))
        else:
            assert engine.outputs(name) == whole
