"""Random traces on the toy runner: every invariant after every step, and the right tokens at the end."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from toy import VOCAB_SIZE, ToyEngine, toy_continuation

# Few distinct tokens at the front, so that prefixes are often shared.
PROMPTS = st.one_of(
    st.lists(st.integers(0, 1), min_size=1, max_size=40),
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=60),
)


class SchedulerMachine(RuleBasedStateMachine):
    """add, step, abort and finish in any order, on pools from roomy to barely enough for one."""

    @initialize(
        policy=st.sampled_from(["chunked", "phased"]),
        block_size=st.sampled_from([1, 2, 4, 5]),
        max_num_seqs=st.integers(1, 6),
        extra_budget=st.integers(0, 20),
        prefix_caching=st.booleans(),
        headroom=st.integers(0, 2),
        pool=st.sampled_from([1.0, 1.3, 2.0, 6.0]),
        max_consecutive_prefills=st.integers(1, 4),
    )
    def make(
        self, policy, block_size, max_num_seqs, extra_budget, prefix_caching, headroom, pool,
        max_consecutive_prefills,
    ):  # fmt: skip
        max_model_len = 80
        self.engine = ToyEngine(
            num_blocks=int(-(-max_model_len // block_size) * pool),
            block_size=block_size,
            enable_prefix_caching=prefix_caching,
            policy=policy,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_budget,
            admission_headroom=headroom,
            max_consecutive_prefills=max_consecutive_prefills,
        )
        self.expected = {}
        self.gone = set()

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 30),
        stop_ids=st.sampled_from([(), (0, 1, 2), tuple(range(10))]),
        salt=st.sampled_from([None, None, "a"]),
    )
    def add(self, prompt, max_tokens, stop_ids, salt):
        name = f"r{len(self.expected)}"
        self.engine.add(name, prompt, max_tokens, stop_ids, cache_salt=salt)
        self.expected[name] = toy_continuation(prompt, max_tokens, set(stop_ids), max_model_len=80)

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
            plan = scheduler.schedule()
            result = self.engine.runner.execute(plan)
            scheduler.abort(name)
            scheduler.update(plan, result)
        else:
            scheduler.abort(name)
        assert scheduler.find(name) is None

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        tokens = self.engine.run()
        assert tokens.keys() == self.expected.keys()
        for name, expected in self.expected.items():
            if name in self.gone:
                assert tokens[name] == expected[: len(tokens[name])]
            else:
                assert tokens[name] == expected
        kv = self.engine.scheduler.kv
        assert kv.num_available_blocks == kv.pool.num_blocks


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=300, stateful_step_count=30, deadline=None)
