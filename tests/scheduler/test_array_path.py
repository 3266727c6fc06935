"""The array operations of the scheduler give exactly the plans of a plain loop over requests."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from support.examples import examples
from treadle.scheduler import guards
from treadle.scheduler.decodes import Decodes
from treadle.testing.toy import ToyEngine


def decodes_one_by_one(self):
    """`Decodes.run` as a plain loop over requests in rank order."""
    batch = self._state.batch
    rows_of = {}
    for seq in batch.sequences[batch.decoding_rows()]:
        rows_of.setdefault(seq.request, []).append(seq)
    for request, sequences in rows_of.items():
        if sequences[0].row is None:
            continue  # preempted for a request ahead of it
        num_blocks = self._num_blocks_needed(sequences)
        if num_blocks and self._make_room_for(request, num_blocks):
            self._draft.grow(request, sequences)
    decoding = [seq for sequences in rows_of.values() for seq in sequences if seq.row is not None]
    rows = batch.rows
    self._draft.add_decodes(rows[np.isin(rows, [seq.row for seq in decoding])])


class WithoutShortcuts:
    """A context in which blocks are allocated request by request and refusals are never remembered."""

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch

    def __enter__(self):
        self.context = self.monkeypatch.context()
        patch = self.context.__enter__()
        patch.setattr(Decodes, "run", decodes_one_by_one)
        patch.setattr(guards, "is_still_refused", lambda state, request: False)

    def __exit__(self, *args):
        self.context.__exit__(*args)


def picture(engine, report):
    return (
        report.plan.step,
        report.details.ran,
        report.plan.drafts.tolist(),
        report.plan.moves,
        report.preempted,
        report.swapped_in,
        report.ignored,
        report.refusals,
        {
            seq.request.request_id: engine.scheduler.kv.block_table(seq)
            for seq in engine.scheduler.batch.running_sequences()
        },
    )


ARRIVAL = st.tuples(
    st.integers(1, 40),  # prompt length
    st.integers(1, 30),  # max_tokens
    st.integers(1, 3),  # n
    st.integers(0, 2),  # priority
    st.integers(0, 3),  # steps before the next arrival
)


@pytest.fixture(scope="module")
def patcher():
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield monkeypatch


@examples(400)
@given(
    policy=st.sampled_from(["chunked", "three-phase", "prefill-first", "phased"]),
    order=st.sampled_from(["fcfs", "priority", "shortest-first"]),
    mode=st.sampled_from(["auto", "recompute", "swap"]),
    lookahead=st.sampled_from([0, 0, 2, 5]),
    pool=st.sampled_from([18, 24, 60]),
    host=st.sampled_from([0, 10, 40]),
    headroom=st.integers(0, 1),
    arrivals=st.lists(ARRIVAL, min_size=1, max_size=14),
)
def test_the_shortcut_gives_the_plans_of_the_general_path(
    policy, order, mode, lookahead, pool, host, headroom, arrivals, patcher
):
    def make():
        return ToyEngine(
            num_blocks=pool, block_size=4, num_host_blocks=host, scheduler=policy, order=order, preemption_mode=mode,
            max_model_len=60, max_num_seqs=6, max_num_batched_tokens=14,
            num_lookahead_slots=lookahead, admission_headroom=headroom,
        )  # fmt: skip

    def step_both():
        report = short.step()
        with WithoutShortcuts(patcher):
            general_report = general.step()
        assert picture(short, report) == picture(general, general_report)

    short, general = make(), make()
    for i, (length, max_tokens, n, priority, pause) in enumerate(arrivals):
        for engine in (short, general):
            engine.add(f"r{i}", [(i * 7 + k) % 50 for k in range(length)], max_tokens, n=n, priority=priority)
        for _ in range(pause):
            if short.scheduler.num_unfinished_requests:
                step_both()
    for _ in range(5000):
        if not short.scheduler.num_unfinished_requests:
            break
        step_both()
    assert not general.scheduler.num_unfinished_requests
