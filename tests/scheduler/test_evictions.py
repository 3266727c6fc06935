"""Preemptions make enough room for the request that needs it, with as few victims as possible."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from support.examples import examples
from treadle.scheduler import WaitReason
from treadle.scheduler.decodes import Decodes
from treadle.scheduler.eviction import fewest
from treadle.testing.toy import ToyEngine, toy_continuation

B = 4
POLICIES = ["chunked", "three-phase", "prefill-first", "phased"]


def test_no_displacement_if_all_victims_free_too_few_seats():
    engine = ToyEngine(order="priority", max_num_seqs=4, max_num_batched_tokens=16)
    engine.add("best", [1, 2], 30, priority=0)
    for i in range(3):
        engine.add(f"low {i}", [3, i], 30, priority=5)
    engine.step()
    engine.add("four", [5, 6, 7], 5, n=4, priority=1)
    while "best" not in engine.finished:
        assert not engine.step().preempted
    # When "best" has freed its seat, the seats of the other requests are enough.
    assert {p.for_request_id for report in engine.reports for p in report.preempted} <= {"four"}
    engine.run()
    assert engine.outputs("four") == [toy_continuation([5, 6, 7], 5, index=i) for i in range(4)]


def test_no_displacement_if_all_victims_free_too_few_blocks():
    engine = ToyEngine(num_blocks=12, block_size=B, order="priority", max_model_len=48, admission_headroom=0)
    engine.add("best", [1] * 22, 10, priority=0)
    engine.step()
    engine.step()
    for i in range(2):
        engine.add(f"low {i}", [i] * 4, 20, priority=5)
    engine.step()
    engine.add("large", list(range(40)), 3, priority=1)
    while "best" not in engine.finished:
        assert all(p.for_request_id != "large" for p in engine.step().preempted)
    engine.run()
    assert engine.outputs("large") == [toy_continuation(range(40), 3)]


def test_displacement_preempts_as_few_requests_as_possible():
    engine = ToyEngine(
        num_blocks=15, block_size=B, order="priority", max_model_len=60, admission_headroom=0,
        max_num_batched_tokens=48,
    )  # fmt: skip
    engine.add("wide", [1] * 38, 10, priority=5)
    for i in range(4):
        engine.add(f"low {i}", [2, i], 10, priority=6)
    while engine.scheduler.waiting or engine.scheduler.batch.num_prefilling:
        engine.step()
    assert engine.scheduler.kv.num_available_blocks == 1
    engine.add("three blocks", list(range(12)), 3, priority=1)
    # The last two in rank, which hold one block each.
    assert [p.request_id for p in engine.step().preempted] == ["low 3", "low 2"]
    engine.add("seven blocks", list(range(12, 38)), 3, priority=0)
    # The blocks of the two low ones are not enough; those of the wide one are enough without them.
    assert [p.request_id for p in engine.step().preempted] == ["wide"]
    engine.run()


def test_a_group_that_cannot_grow_is_preempted_without_other_victims():
    """Its children need two blocks at once for copies of their shared tail; the request behind holds only one."""
    engine = ToyEngine(num_blocks=5, block_size=B, max_model_len=20, max_num_seqs=6, admission_headroom=0)
    engine.add("first", [1] * 4, 12)
    engine.add("group", [2] * 5, 3, n=3)
    engine.add("behind", [3], 3)
    victims = []
    while "behind" not in engine.finished:
        victims += [(p.request_id, p.for_request_id) for p in engine.step().preempted]
    assert victims == [("group", "group")]
    engine.run()
    assert engine.outputs("group") == [toy_continuation([2] * 5, 3, index=i) for i in range(3)]


ARRIVAL = st.tuples(
    st.integers(1, 40),  # prompt length
    st.integers(1, 30),  # max_tokens
    st.integers(1, 4),  # n
    st.integers(0, 3),  # priority
    st.integers(0, 3),  # steps before the next arrival
)


class Growing:
    """Checks the victims of every attempt to make room for a decode, and the number of free blocks afterwards."""

    def __init__(self, monkeypatch):
        make_room_for = Decodes._make_room_for

        def watched(decodes, request, num_blocks):
            kv = decodes._state.kv
            victims_before, missing = len(decodes._draft.preempted), num_blocks - kv.num_available_blocks
            freed = {r.request_id: len(kv.freed_by(rows(r))) for r in decodes._state.batch.running_requests()}
            has_room = make_room_for(decodes, request, num_blocks)
            victims = [p.request_id for p in decodes._draft.preempted[victims_before:]]
            assert kv.num_available_blocks >= num_blocks or not has_room
            if has_room:
                assert request.request_id not in victims
                for victim in victims:  # without any one of them the room would be too small
                    assert kv.num_available_blocks - freed[victim] < num_blocks
            else:
                assert set(victims) <= {request.request_id}
            assert missing > 0 or not victims
            return has_room

        monkeypatch.setattr(Decodes, "_make_room_for", watched)


def rows(request):
    import numpy as np

    return np.array([seq.row for seq in request.live_sequences])


@pytest.fixture(scope="module")
def patcher():
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield monkeypatch


@examples(400)
@given(
    policy=st.sampled_from(POLICIES),
    order=st.sampled_from(["fcfs", "priority", "priority"]),
    mode=st.sampled_from(["auto", "recompute", "swap"]),
    pool=st.sampled_from([18, 24, 60]),
    host=st.sampled_from([0, 40]),
    headroom=st.integers(0, 1),
    caching=st.booleans(),
    arrivals=st.lists(ARRIVAL, min_size=3, max_size=14),
)
def test_preemptions_make_enough_room_with_no_redundant_victim(
    policy, order, mode, pool, host, headroom, caching, arrivals, patcher
):
    engine = ToyEngine(
        num_blocks=pool, block_size=4, num_host_blocks=host, scheduler=policy, order=order, preemption_mode=mode,
        max_model_len=60, max_num_seqs=6, max_num_batched_tokens=20, admission_headroom=headroom,
        enable_prefix_caching=caching,
    )  # fmt: skip

    def step():
        if not engine.scheduler.num_unfinished_requests:
            return
        waited = {r.request_id: r for r in engine.scheduler.waiting}
        engine.step(before_update=lambda report: check(report, waited))

    def check(report, waited):
        reasons = {r.request_id: r.reason for r in report.refusals}
        for p in report.preempted:
            if p.for_request_id in waited and p.for_request_id not in report.ignored:
                request = waited[p.for_request_id]
                # The request starts now, or as soon as the policy runs prompts.
                later = {
                    WaitReason.NO_TOKEN_BUDGET,
                    WaitReason.PROMPT_EXCEEDS_BUDGET,
                    WaitReason.PREEMPTION_IN_STEP,
                    WaitReason.DECODE_STEP,
                }
                assert request.num_reserved_seats or request.sequences[0].row is not None or (
                    policy in ("prefill-first", "phased") or reasons[request.request_id] in later
                )  # fmt: skip
                if policy in ("chunked", "three-phase"):
                    assert reasons.get(request.request_id) is not WaitReason.PREEMPTION_IN_STEP

    with patcher.context():
        Growing(patcher)
        for i, (length, max_tokens, n, priority, pause) in enumerate(arrivals):
            engine.add(f"r{i}", [(i * 7 + k) % 50 for k in range(length)], max_tokens, n=n, priority=priority)
            for _ in range(pause):
                step()
        for _ in range(5000):
            step()
    assert not engine.scheduler.num_unfinished_requests


CANDIDATES = st.lists(st.frozensets(st.integers(0, 12), max_size=4), min_size=1, max_size=8)


@given(candidates=CANDIDATES, needed=st.integers(1, 10))
def test_fewest_selects_a_minimal_list_of_victims(candidates, needed):
    """A candidate frees the blocks that it alone holds; shared blocks are freed with their last holder."""
    named = list(enumerate(candidates))

    def suffices(chosen):
        gone, left = [blocks for _, blocks in chosen], [blocks for c, blocks in named if (c, blocks) not in chosen]
        return len(frozenset().union(*gone) - frozenset().union(*left)) >= needed

    chosen = fewest(named, suffices)
    assert bool(chosen) == suffices(named)
    assert not chosen or suffices(chosen)
    for candidate in chosen:
        assert not suffices([other for other in chosen if other != candidate])
    if chosen:  # candidates earlier in the list are not sufficient
        last = max(number for number, _ in chosen)
        assert not suffices(named[:last])
