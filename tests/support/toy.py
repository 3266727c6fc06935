"""A runner whose next token is a hash of the whole history, read through the block tables.

Any block lost, shared wrongly, written twice or read before it is written changes the tokens, so equality
with `toy_continuation`, which knows no blocks, shows that scheduler and cache kept every token in place. The
adapter and the number of the sequence are mixed into the hash; swaps and copies move the toy's blocks as a
real runner's; a toy drafter guesses tokens into the lookahead slots.
"""

import zlib

import numpy as np

from treadle.clock import VirtualClock
from treadle.config import CacheConfig, SchedulerConfig
from treadle.request import Request
from treadle.sampling_params import SamplingParams
from treadle.scheduler import Scheduler, SequenceResult, StepPlan, StepResult, check_invariants

VOCAB_SIZE = 50
NEVER_WRITTEN = -7
REJECTED = -9
"""What a wrong draft leaves in a lookahead slot."""


def toy_hash(history, *salt) -> int:
    return zlib.crc32(np.asarray([*salt, *history], dtype=np.int32).tobytes())


def toy_next_token(history, adapter=0, index=0) -> int:
    return toy_hash(history, adapter, index) % VOCAB_SIZE


def toy_candidates(history, count, adapter=0) -> list[tuple[int, float]]:
    """Beam search's view: a log-probability for every token, by hash, best first."""
    scores = [(toy_hash(history, adapter, 1000 + token) % 1000) / 250.0 + 0.01 for token in range(VOCAB_SIZE)]
    best = sorted(range(VOCAB_SIZE), key=lambda token: (scores[token], token))
    return [(token, -scores[token]) for token in best[:count]]


def toy_continuation(prompt, max_tokens, stop_ids=frozenset(), max_model_len=10**9, adapter=0, index=0) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens and len(tokens) < max_model_len:
        tokens.append(toy_next_token(tokens, adapter, index))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


class ToyRunner:
    """Keeps the token ids where a real runner keeps keys and values."""

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> None:
        self.block_size = block_size
        self.slots = np.full((num_blocks, block_size), NEVER_WRITTEN, dtype=np.int32)
        self.host_slots = np.full((num_host_blocks, block_size), NEVER_WRITTEN, dtype=np.int32)

    def execute(self, plan: StepPlan) -> StepResult:
        for device, host in plan.blocks_to_swap_out:
            self.host_slots[host] = self.slots[device]
        for host, device in plan.blocks_to_swap_in:
            self.slots[device] = self.host_slots[host]
        for source, target in plan.blocks_to_copy:
            self.slots[target] = self.slots[source]
        # As on a real runner, the step's tokens are all written before any of them is read.
        for s in plan.sequences:
            for position in range(s.start, s.start + s.count):
                self._write(plan, s.row, position, int(plan.batch.token_ids[s.row, position]))
        for row in plan.decode_rows.tolist():
            position = int(plan.batch.num_computed_tokens[row])
            self._write(plan, row, position, int(plan.batch.token_ids[row, position]))
        sequences = tuple(self._answer(plan, s) for s in plan.sequences)
        k = plan.num_lookahead_slots
        decodes = np.zeros((len(plan.decode_rows), 1 + k), dtype=np.int32)
        accepted = np.ones(len(plan.decode_rows), dtype=np.int32)
        for i, row in enumerate(plan.decode_rows.tolist()):
            tokens = self._speculate(plan, row, k)
            decodes[i, : len(tokens)] = tokens
            accepted[i] = len(tokens)
        if not k:
            return StepResult(sequences, decodes[:, 0])
        return StepResult(sequences, decodes, accepted)

    def _answer(self, plan, s):
        length = s.start + s.count
        if s.num_candidates:
            history, adapter = self._history(plan, s.row, length), int(plan.batch.adapter_ids[s.row])
            return SequenceResult(candidates=tuple(toy_candidates(history, s.num_candidates, adapter)))
        if s.num_samples == 1:
            return SequenceResult((self._sample(plan, s.row, length),))
        return SequenceResult(tuple(self._sample(plan, s.row, length, i) for i in range(s.num_samples)))

    def _speculate(self, plan, row, k):
        """The next token, and as many drafts after it as happen to be right."""
        position = int(plan.batch.num_computed_tokens[row])
        tokens = [self._sample(plan, row, position + 1)]
        num_right = toy_hash([position], row) % (k + 1)
        for i in range(k):
            is_right = i < num_right
            self._write(plan, row, position + 1 + i, tokens[-1] if is_right else REJECTED)
            if is_right:
                tokens.append(self._sample(plan, row, position + 2 + i))
        return tokens

    def _write(self, plan, row, position, token):
        block = plan.block_tables[row, position // self.block_size]
        self.slots[block, position % self.block_size] = token

    def _history(self, plan, row, length):
        blocks = plan.block_tables[row, : -(-length // self.block_size)]
        history = self.slots[blocks].reshape(-1)[:length]
        assert (history >= 0).all(), "a slot was read before it was written"
        return history

    def _sample(self, plan, row, length, index=None):
        seq = plan.batch.sequences[row]
        history = self._history(plan, row, length)
        assert seq.request.sampling_params.use_beam_search is False
        return toy_next_token(history, int(plan.batch.adapter_ids[row]), seq.index if index is None else index)


def toy_request(request_id, prompt, max_tokens=16, stop_ids=(), n=1, params=None, **kwargs) -> Request:
    params = SamplingParams(
        temperature=1.0, max_tokens=max_tokens, stop_token_ids=list(stop_ids), n=n, **(params or {})
    )
    return Request(request_id, prompt, params, stop_token_ids=frozenset(stop_ids), **kwargs)


class ToyEngine:
    """Scheduler and toy runner in the loop, with every invariant checked in every step."""

    def __init__(
        self, *, num_blocks=64, block_size=4, num_host_blocks=0, enable_prefix_caching=True, **scheduler
    ) -> None:
        lookahead = scheduler.get("num_lookahead_slots", 0)
        scheduler.setdefault("max_model_len", num_blocks * block_size - lookahead)
        scheduler.setdefault("max_num_seqs", 8)
        scheduler.setdefault("max_num_batched_tokens", 16)
        if scheduler.get("policy") in ("three-phase", "prefill-first"):
            scheduler["max_num_batched_tokens"] = max(scheduler["max_num_batched_tokens"], scheduler["max_model_len"])
        self.clock = VirtualClock()
        self.scheduler = Scheduler(
            SchedulerConfig(**scheduler),
            CacheConfig(
                num_blocks=num_blocks,
                num_host_blocks=num_host_blocks,
                block_size=block_size,
                enable_prefix_caching=enable_prefix_caching,
            ),
            self.clock,
        )
        self.runner = ToyRunner(num_blocks, block_size, num_host_blocks)
        self.plans: list[StepPlan] = []
        self.observers = []
        self.finished: dict[str, Request] = {}

    def add(self, *args, **kwargs) -> Request:
        request = toy_request(*args, arrival_time=self.clock.now(), **kwargs)
        self.scheduler.add(request)
        return request

    def step(self, before_update=lambda plan: None) -> StepPlan:
        plan = self.scheduler.schedule()
        check_invariants(self.scheduler, plan)
        for observer in self.observers:
            observer.on_schedule(plan)
        result = self.runner.execute(plan)
        before_update(plan)
        self.scheduler.update(plan, result)
        self.clock.advance(1.0)
        check_invariants(self.scheduler)
        self.plans.append(plan)
        finished = self.collect()
        for observer in self.observers:
            observer.on_update(plan, finished)
        return plan

    def collect(self) -> list[Request]:
        finished = self.scheduler.take_finished()
        for request in finished:
            assert request.request_id not in self.finished, "a request was finished twice"
            self.finished[request.request_id] = request
        return finished

    def run(self, max_steps=10_000) -> dict[str, list[int]]:
        """Step until all is done: name → the first sequence's output."""
        for _ in range(max_steps):
            if not self.scheduler.num_unfinished_requests:
                break
            self.step()
        else:
            raise AssertionError(f"requests are unfinished after {max_steps} steps")
        self.collect()
        return {name: r.sequences[0].output_token_ids for name, r in self.finished.items()}

    def outputs(self, name) -> list[list[int]]:
        return [seq.output_token_ids for seq in self.finished[name].sequences]


def toy_beam_search(
    prompt, width, max_tokens, *, stop_ids=frozenset(), length_penalty=1.0, early_stopping=False,
    max_model_len=10**9, adapter=0,
) -> list[list[int]]:  # fmt: skip
    """Beam search over whole token lists, without blocks: the best outputs, best first."""
    longest = min(max_tokens, max_model_len - len(prompt))
    live, finished = [(0.0, [])], []

    def score(logprob, length):
        return logprob / length**length_penalty

    for length in range(1, longest + 1):
        grown = [
            (logprob + more, parent, token, [*tokens, token])
            for parent, (logprob, tokens) in enumerate(live)
            for token, more in toy_candidates([*prompt, *tokens], width * max(2, 1 + len(stop_ids)), adapter)
        ]
        grown.sort(key=lambda g: (-g[0], g[1], g[2]))
        live = []
        for place, (logprob, _, token, tokens) in enumerate(grown):
            if token in stop_ids:
                if place < width:
                    finished.append((score(logprob, length), logprob, tokens))
            elif len(live) < width:
                live.append((logprob, tokens))
        finished = sorted(finished, key=lambda f: -f[0])[:width]
        if not live:
            break
        if len(finished) == width:
            reach = longest if early_stopping == "never" and length_penalty > 0 else length
            if early_stopping is True or finished[-1][0] >= score(live[0][0], reach):
                break
        if length == longest:
            finished += [(score(logprob, length), logprob, tokens) for logprob, tokens in live]
            finished = sorted(finished, key=lambda f: -f[0])[:width]
    return [tokens for _, _, tokens in finished]
