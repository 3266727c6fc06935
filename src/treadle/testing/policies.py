"""Runs a policy through random traces on the toy runner, with all features at once."""

import logging
import random
from typing import Any

from treadle.core.lora import LoRARequest
from treadle.scheduler.policies import PhasePolicy, QueueOrder, VictimPolicy
from treadle.testing.toy import VOCAB_SIZE, ToyEngine, toy_beam_search, toy_continuation

MAX_MODEL_LEN = 60


def check_policy(policy: type[Any], num_traces: int = 12) -> None:
    """Raise AssertionError unless a policy serves every request of random traces, with the right tokens.

    The traces have requests with several sequences, beams, adapters, swaps, aborts and pools that are barely enough
    for one sequence. All invariants are checked in every step, each trace must give the same plans when it is run
    again, and the scheduler must never have replaced the policy by the default.

    Args:
        policy: a subclass of PhasePolicy, QueueOrder or VictimPolicy.
        num_traces: how many traces to run.
    """
    bases = {PhasePolicy: "scheduler", QueueOrder: "order", VictimPolicy: "victim_policy"}
    settings = [setting for base, setting in bases.items() if issubclass(policy, base)]
    assert len(settings) == 1, f"{policy.__name__} must be a PhasePolicy, a QueueOrder or a VictimPolicy"
    errors: list[str] = []
    handler = _Errors(errors)
    logging.getLogger("treadle").addHandler(handler)
    try:
        for seed in range(num_traces):
            trace = Trace(seed, {settings[0]: policy})
            assert trace.run() == Trace(seed, {settings[0]: policy}).run(), (
                f"trace {seed} gave different plans when it was run again"
            )
            assert not errors, errors[0]
    finally:
        logging.getLogger("treadle").removeHandler(handler)


class _Errors(logging.Handler):
    def __init__(self, errors: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._errors = errors

    def emit(self, record: logging.LogRecord) -> None:
        self._errors.append(record.getMessage())


class Trace:
    """One random trace, which depends only on its seed.

    Args:
        seed: of the random numbers.
        settings: of the scheduler; they override random ones.
    """

    def __init__(self, seed: int, settings: dict[str, Any]) -> None:
        self.rng = rng = random.Random(seed)
        block_size = rng.choice([1, 2, 4, 5])
        needed = -(-MAX_MODEL_LEN // block_size)
        self.max_num_seqs = rng.randint(1, 6)
        scheduler = {
            "scheduler": rng.choice(["chunked", "three-phase", "prefill-first", "phased"]),
            "order": rng.choice(["fcfs", "priority", "shortest-first"]),
            "preemption_mode": rng.choice(["auto", "recompute", "swap"]),
            **settings,
        }
        is_whole = scheduler["scheduler"] in ("three-phase", "prefill-first") or getattr(
            scheduler["scheduler"], "needs_whole_prompts", False
        )
        self.engine = ToyEngine(
            num_blocks=int(needed * rng.choice([1.0, 1.3, 2.0, 6.0])),
            num_host_blocks=int(needed * rng.choice([0.0, 0.3, 2.0])),
            block_size=block_size,
            enable_prefix_caching=rng.random() < 0.7,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=MAX_MODEL_LEN if is_whole else self.max_num_seqs + rng.randint(0, 20),
            admission_headroom=rng.randint(0, 2),
            max_loras=rng.randint(1, 2),
            age_limit_s=rng.choice([None, 5.0, 60.0]),
            long_prefill_token_threshold=rng.choice([None, 0, 1, 8]),
            **scheduler,
        )
        self.expected: dict[str, list[list[int]]] = {}
        self.gone: set[str] = set()

    def run(self) -> list[tuple[Any, ...]]:
        """Run it to the end, check every answer, and return what each step did."""
        scheduler = self.engine.scheduler
        for _ in range(self.rng.randint(3, 14)):
            self.add()
            for _ in range(self.rng.randint(0, 4)):
                if scheduler.num_unfinished_requests:
                    self.engine.step()
            if self.rng.random() < 0.15 and scheduler.num_unfinished_requests:
                self.abort()
        self.engine.run()
        self.check()
        return [(r.details.ran, r.preempted, r.swapped_in, r.refusals) for r in self.engine.reports if r.details]

    def add(self) -> None:
        """Add a random request, and record the expected answer."""
        rng = self.rng
        name = f"r{len(self.expected)}"
        vocabulary = rng.choice([2, VOCAB_SIZE])
        prompt = [rng.randrange(vocabulary) for _ in range(rng.randint(1, 45))]
        max_tokens, n = rng.randint(1, 30), min(rng.choice([1, 1, 2, 4]), self.max_num_seqs)
        stop_ids = rng.choice([(), (0, 1, 2), tuple(range(10))])
        adapter = rng.choice([0, 0, 1, 2, 3])
        is_search = rng.random() < 0.2
        self.engine.add(
            name, prompt, max_tokens, stop_ids, n, params={"use_beam_search": True} if is_search else {},
            priority=rng.randint(0, 3), tenant=rng.choice("xy"),
            deadline=rng.choice([5.0, 50.0, float("inf")]),
            lora=LoRARequest(f"a{adapter}", adapter) if adapter else None,
        )  # fmt: skip
        common: dict[str, Any] = {"stop_ids": frozenset(stop_ids), "max_model_len": MAX_MODEL_LEN, "adapter": adapter}
        if is_search:
            self.expected[name] = toy_beam_search(prompt, n, max_tokens, **common)
        else:
            self.expected[name] = [toy_continuation(prompt, max_tokens, index=i, **common) for i in range(n)]

    def abort(self) -> None:
        """Abort a random request, between steps or while one runs."""
        scheduler = self.engine.scheduler
        name = self.rng.choice([r.request_id for r in scheduler.unfinished_requests()])
        self.gone.add(name)
        if self.rng.random() < 0.5:
            self.engine.step(before_update=lambda report: scheduler.abort(name))
        else:
            scheduler.abort(name)

    def check(self) -> None:
        """Raise AssertionError unless every request has the right answer, and every block is free again."""
        assert self.engine.finished.keys() == self.expected.keys()
        ignored = {name for report in self.engine.reports for name in report.ignored}
        for name, expected in self.expected.items():
            request = self.engine.finished[name]
            outputs = [seq.output_token_ids for seq in request.sequences]
            if request.error is not None:  # several sequences may need more than the whole pool; one never does
                assert request.sampling_params.n > 1
                assert name in ignored
            elif name not in self.gone:
                assert outputs == expected, f"{name} has wrong tokens"
        for pool in (self.engine.scheduler.kv.pool, self.engine.scheduler.kv.host_pool):
            assert pool.num_available == pool.num_blocks
