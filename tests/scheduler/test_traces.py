"""Random traces on the toy runner with all features: invariants hold after every step, and the tokens are right."""

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from support.examples import examples
from treadle.core.lora import LoRARequest
from treadle.testing.toy import VOCAB_SIZE, ToyEngine, toy_beam_search, toy_continuation

MAX_MODEL_LEN = 60
POLICIES = ["chunked", "three-phase", "prefill-first", "phased"]
ORDERS = ["fcfs", "priority", "shortest-first", "fair", "deadline", "least-slack", "cache-aware"]

# Few distinct tokens at the beginning, so that prefixes are often shared.
PROMPTS = st.one_of(
    st.lists(st.integers(0, 1), min_size=1, max_size=30),
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=45),
)


class SchedulerMachine(RuleBasedStateMachine):
    """add, step and abort in any order, with and without drafts, in pools from large to just enough for one request."""

    @initialize(
        policy=st.sampled_from(POLICIES),
        order=st.sampled_from(ORDERS),
        mode=st.sampled_from(["auto", "recompute", "swap"]),
        block_size=st.sampled_from([1, 2, 4, 5]),
        max_num_seqs=st.integers(1, 6),
        extra_budget=st.integers(0, 20),
        prefix_caching=st.booleans(),
        headroom=st.integers(0, 2),
        pool=st.sampled_from([1.0, 1.3, 2.0, 6.0]),
        host=st.sampled_from([0.0, 0.3, 2.0]),
        limit=st.integers(1, 4),
        threshold=st.sampled_from([None, 0, 1, 8]),
        victims=st.sampled_from(["last-in-rank", "least-computed"]),
        lookahead=st.sampled_from([0, 0, 1, 3, 6]),
        max_loras=st.integers(1, 2),
        age_limit_s=st.sampled_from([None, 5.0, 60.0]),
    )
    def make(
        self, policy, order, mode, block_size, max_num_seqs, extra_budget, prefix_caching, headroom, pool, host,
        limit, threshold, victims, lookahead, max_loras, age_limit_s,
    ):  # fmt: skip
        needed = -(-MAX_MODEL_LEN // block_size)
        self.max_num_seqs = max_num_seqs
        self.engine = ToyEngine(
            num_blocks=int(needed * pool),
            num_host_blocks=int(needed * host),
            block_size=block_size,
            enable_prefix_caching=prefix_caching,
            scheduler=policy,
            order=order,
            preemption_mode=mode,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_budget,
            admission_headroom=headroom,
            max_consecutive_prefills=limit,
            long_prefill_token_threshold=threshold,
            victim_policy=victims,
            num_lookahead_slots=lookahead,
            max_loras=max_loras,
            age_limit_s=age_limit_s,
        )
        self.expected = {}
        self.gone = set()

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 30),
        stop_ids=st.sampled_from([(), (0, 1, 2), tuple(range(10))]),
        salt=st.sampled_from([None, None, "a"]),
        n=st.integers(1, 4),
        beams=st.sampled_from([False, False, True]),
        early_stopping=st.sampled_from([True, False, "never"]),
        length_penalty=st.sampled_from([0.0, 1.0, 2.0]),
        priority=st.integers(0, 3),
        tenant=st.sampled_from(["x", "y"]),
        deadline=st.sampled_from([5.0, 50.0, float("inf")]),
        adapter=st.sampled_from([0, 0, 1, 2, 3]),
    )
    def add(
        self, prompt, max_tokens, stop_ids, salt, n, beams, early_stopping, length_penalty, priority, tenant,
        deadline, adapter,
    ):  # fmt: skip
        name = f"r{len(self.expected)}"
        n = min(n, self.max_num_seqs)
        search = {"length_penalty": length_penalty, "early_stopping": early_stopping}
        self.engine.add(
            name, prompt, max_tokens, stop_ids, n, params={"use_beam_search": True, **search} if beams else {},
            cache_salt=salt, priority=priority, tenant=tenant, deadline=deadline,
            lora=LoRARequest(f"a{adapter}", adapter) if adapter else None,
        )  # fmt: skip
        common = {"stop_ids": frozenset(stop_ids), "max_model_len": MAX_MODEL_LEN, "adapter": adapter}
        if beams:
            self.expected[name] = toy_beam_search(prompt, n, max_tokens, **search, **common)
        else:
            self.expected[name] = [toy_continuation(prompt, max_tokens, index=i, **common) for i in range(n)]

    @rule(count=st.integers(1, 8))
    def step(self, count):
        for _ in range(count):
            if self.engine.scheduler.num_unfinished_requests:
                self.engine.step()

    @precondition(lambda self: self.engine.scheduler.num_unfinished_requests)
    @rule(data=st.data(), while_executing=st.booleans())
    def abort(self, data, while_executing):
        scheduler = self.engine.scheduler
        name = data.draw(st.sampled_from([r.request_id for r in scheduler.unfinished_requests()]))
        self.gone.add(name)
        if while_executing:
            self.engine.step(before_update=lambda report: scheduler.abort(name))
        else:
            scheduler.abort(name)
        assert scheduler.find(name) is None

    @precondition(lambda self: self.engine.scheduler.batch.rows.size)
    @rule(data=st.data())
    def finish_one_child(self, data):
        sequences = [
            seq
            for seq in self.engine.scheduler.batch.running_sequences()
            if seq.request.is_forked and not seq.request.sampling_params.use_beam_search
        ]
        if sequences:
            seq = data.draw(st.sampled_from(sequences))
            self.gone.add(seq.request.request_id)
            self.engine.scheduler.finish_sequence(seq, "stop", "a stop string")

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.engine.run()
        assert self.engine.finished.keys() == self.expected.keys()
        for name, expected in self.expected.items():
            self.check(self.engine.finished[name], expected)
        for pool in (self.engine.scheduler.kv.pool, self.engine.scheduler.kv.host_pool):
            assert pool.num_available == pool.num_blocks

    def check(self, request, expected):
        outputs = [seq.output_token_ids for seq in request.sequences]
        if request.error is not None:
            # Several sequences may need more than the whole pool; a single one never does.
            assert request.sampling_params.n > 1
            assert "sequences need more than" in request.error
        elif request.request_id not in self.gone:
            assert outputs == expected
            return
        if not request.sampling_params.use_beam_search:
            assert all(out == whole[: len(out)] for out, whole in zip(outputs, expected, strict=False))


TestSchedulerMachine = pytest.mark.slow(SchedulerMachine.TestCase)
TestSchedulerMachine.settings = examples(900, stateful_step_count=30)
