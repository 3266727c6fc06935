"""A runner whose next token is a hash of the whole history, read through the block tables.

A block that is lost, wrongly shared, written twice or read before it is written changes the tokens. Equality with
`toy_continuation`, which does not use blocks, therefore shows that scheduler and cache kept every token in place. The
hash includes the adapter and the sequence's index; swaps and copies move blocks as in a real runner; a toy drafter
proposes tokens, some of which are right.
"""

import pickle
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np

from treadle.core.clock import VirtualClock
from treadle.core.config import CacheConfig, SchedulerConfig
from treadle.core.request import IntArray, Request
from treadle.core.sampling_params import SamplingParams
from treadle.engine import Observer
from treadle.runner.row_table import RowTable
from treadle.scheduler import RunSequence, Scheduler, StepPlan, StepReport, StepResult, check_invariants

Tokens = Sequence[int] | IntArray

VOCAB_SIZE = 50
NEVER_WRITTEN = -7


def toy_hash(history: Tokens, *salt: int) -> int:
    """A number that depends on every token of a history, and on its length."""
    return zlib.crc32(np.asarray([*salt, *history], dtype=np.int32).tobytes())


def toy_next_token(history: Tokens, adapter: int = 0, index: int = 0) -> int:
    """The token that the toy model gives after `history`, for one sequence of a request."""
    return toy_hash(history, adapter, index) % VOCAB_SIZE


def toy_candidates(history: Tokens, count: int, adapter: int = 0) -> list[tuple[int, float]]:
    """The most likely tokens for beam search with their log-probabilities, which are hashes; best first."""
    scores = [(toy_hash(history, adapter, 1000 + token) % 1000) / 250.0 + 0.01 for token in range(VOCAB_SIZE)]
    best = sorted(range(VOCAB_SIZE), key=lambda token: (scores[token], token))
    return [(token, -scores[token]) for token in best[:count]]


def toy_continuation(
    prompt: Iterable[int],
    max_tokens: int,
    stop_ids: Collection[int] = frozenset(),
    max_model_len: int = 10**9,
    adapter: int = 0,
    index: int = 0,
) -> list[int]:
    """The toy model's output after `prompt`, computed without blocks or steps."""
    prompt = list(prompt)
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens and len(tokens) < max_model_len:
        tokens.append(toy_next_token(tokens, adapter, index))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


class ToyRunner:
    """Stores token ids where a real runner stores keys and values, and knows only what plans say.

    Args:
        num_blocks, block_size, num_host_blocks: shape of the KV cache.
        max_num_seqs, max_model_len: the scheduler's.
        drafts: how many tokens it proposes for each decoding sequence; some are right, some are wrong.
    """

    supports_lora = True

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        *,
        max_num_seqs: int = 256,
        max_model_len: int | None = None,
        drafts: int = 0,
    ) -> None:
        self.block_size = block_size
        self.slots = np.full((num_blocks, block_size), NEVER_WRITTEN, dtype=np.int32)
        self.host_slots = np.full((num_host_blocks, block_size), NEVER_WRITTEN, dtype=np.int32)
        self.table = RowTable(max_num_seqs, max_model_len or num_blocks * block_size, block_size)
        self.drafts = drafts

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step, from a pickled copy of its plan."""
        pickled = pickle.dumps(plan)
        assert b"treadle.core.request" not in pickled, "a plan contains a live object"
        plan = pickle.loads(pickled)  # as if the runner were in another process
        table = self.table
        table.take(plan)
        for device, host in plan.moves.swap_out:
            self.host_slots[host] = self.slots[device]
        for host, device in plan.moves.swap_in:
            self.slots[device] = self.host_slots[host]
        for source, target in plan.moves.copy:
            self.slots[target] = self.slots[source]
        # As on a real runner, the step's tokens are all written before any of them is read.
        drafts = iter(plan.drafts.tolist())
        written = []
        for row, start, count in zip(plan.rows.tolist(), plan.starts.tolist(), plan.counts.tolist(), strict=True):
            known = table.token_ids[row, start : min(start + count, table.num_tokens[row])].tolist()
            tokens = known + [next(drafts) for _ in range(count - len(known))]
            for i, token in enumerate(tokens):
                self._write(row, start + i, token)
            written.append(tokens)
        token_ids: list[int] = []
        accepted: list[int] = []
        sampled: list[int] = []
        candidates: dict[int, tuple[tuple[int, float], ...]] = {}
        for i, row in enumerate(plan.rows.tolist()):
            length = int(plan.starts[i] + plan.counts[i])
            if plan.candidates is not None and plan.candidates[i]:
                history, adapter = self._history(row, length), int(table.adapter_ids[row])
                candidates[i] = tuple(toy_candidates(history, int(plan.candidates[i]), adapter))
            elif plan.num_prefills <= i < plan.num_prefills + plan.num_decodes:
                tokens = self._accept(row, int(plan.starts[i]), written[i][1:])
                token_ids += tokens
                accepted.append(len(tokens))
                self._note(row, tokens)
                sampled.append(row)
            elif plan.samples[i]:
                own = table.sampling.sequence_index[row]
                indices = range(plan.samples[i]) if plan.samples[i] > 1 else [own]
                tokens = [self._sample(row, length, index) for index in indices]
                token_ids += tokens
                self._note(row, tokens[:1])
                sampled.append(row)
        return StepResult(
            np.array(token_ids, dtype=np.int32),
            num_accepted=np.array(accepted, dtype=np.int32) if len(plan.drafts) else None,
            candidates=candidates,
            drafts={row: self._propose(row) for row in sampled} if self.drafts else {},
        )

    def _note(self, row: int, tokens: list[int]) -> None:
        for token in tokens:
            if self.table.num_tokens[row] < self.table.token_ids.shape[1]:
                self.table.append(np.array([row], dtype=np.int32), np.array([token], dtype=np.int32))

    def _accept(self, row: int, start: int, drafts: list[int]) -> list[int]:
        """The next token, and further ones as long as the drafts are right."""
        tokens = [self._sample(row, start + 1)]
        for i, draft in enumerate(drafts):
            if draft != tokens[-1]:
                break
            tokens.append(self._sample(row, start + 2 + i))
        return tokens

    def _propose(self, row: int) -> IntArray:
        """Guesses at the next tokens, of which the first few are right."""
        table = self.table
        tokens = table.token_ids[row, : table.num_tokens[row]].tolist()
        num_right = toy_hash(tokens, 3) % (self.drafts + 1)
        guesses: list[int] = []
        for i in range(self.drafts):
            token = toy_next_token([*tokens, *guesses], int(table.adapter_ids[row]), self._index(row))
            guesses.append(token if i < num_right else (token + 1) % VOCAB_SIZE)
        return np.array(guesses, dtype=np.int32)

    def _write(self, row: int, position: int, token: int) -> None:
        block = self.table.block_tables[row, position // self.block_size]
        self.slots[block, position % self.block_size] = token

    def _history(self, row: int, length: int) -> IntArray:
        blocks = self.table.block_tables[row, : -(-length // self.block_size)]
        history: IntArray = self.slots[blocks].reshape(-1)[:length]
        assert (history >= 0).all(), "a slot was read before it was written"
        return history

    def _index(self, row: int) -> int:
        return int(self.table.sampling.sequence_index[row])

    def _sample(self, row: int, length: int, index: int | None = None) -> int:
        history = self._history(row, length)
        adapter = int(self.table.adapter_ids[row])
        return toy_next_token(history, adapter, self._index(row) if index is None else int(index))


def toy_request(
    request_id: str,
    prompt: Iterable[int],
    max_tokens: int = 16,
    stop_ids: Iterable[int] = (),
    n: int = 1,
    params: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Request:
    """A request to the toy model.

    Args:
        request_id, prompt, kwargs: of Request.
        max_tokens, stop_ids, n, params: of its SamplingParams.
    """
    stop_ids = tuple(stop_ids)
    sampling_params = SamplingParams(
        temperature=1.0, max_tokens=max_tokens, stop_token_ids=list(stop_ids), n=n, **(params or {})
    )
    return Request(request_id, list(prompt), sampling_params, stop_token_ids=frozenset(stop_ids), **kwargs)


class ToyEngine:
    """Scheduler and toy runner in a loop that checks every invariant in every step.

    Args:
        num_blocks, block_size, num_host_blocks, enable_prefix_caching: of the KV cache.
        scheduler: settings of SchedulerConfig; small ones by default.

    Attributes:
        reports, plans: of every step.
        observers: called after every step.
        on_planned: called with each step's report before the step runs.
        finished: requests that have ended, by name.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        num_host_blocks: int = 0,
        enable_prefix_caching: bool = True,
        **scheduler: Any,
    ) -> None:
        scheduler.setdefault("max_model_len", num_blocks * block_size)
        scheduler.setdefault("max_num_seqs", 8)
        scheduler.setdefault("max_num_batched_tokens", 16)
        if scheduler.get("scheduler") in ("three-phase", "prefill-first"):
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
        self.scheduler.wants_details = True
        self.runner = ToyRunner(
            num_blocks,
            block_size,
            num_host_blocks,
            max_num_seqs=scheduler["max_num_seqs"],
            max_model_len=scheduler["max_model_len"],
            drafts=scheduler.get("num_lookahead_slots", 0),
        )
        self.reports: list[StepReport] = []
        self.plans: list[StepPlan] = []
        self.observers: list[Observer] = []
        self.on_planned: list[Callable[[StepReport], None]] = []
        self.finished: dict[str, Request] = {}

    def add(self, *args: Any, **kwargs: Any) -> Request:
        """Queue a request, see `toy_request`."""
        request = toy_request(*args, arrival_time=self.clock.now(), **kwargs)
        self.scheduler.add(request)
        return request

    def step(self, before_update: Callable[[StepReport], None] = lambda _: None) -> StepReport:
        """Run one step; `before_update` is called when the runner has answered."""
        plan = self.scheduler.schedule()
        check_invariants(self.scheduler, plan)
        report = self.scheduler.report
        assert report is not None
        for look in self.on_planned:
            look(report)
        result = self.runner.execute(plan)
        before_update(report)
        outputs = self.scheduler.update(plan, result)
        self.clock.advance(1.0)
        check_invariants(self.scheduler)
        self.plans.append(plan)
        self.reports.append(report)
        finished = self.collect()
        for observer in self.observers:
            observer.on_step(report, outputs, finished)
        return report

    @property
    def report(self) -> StepReport:
        """The report of the latest step."""
        return self.reports[-1]

    def prefills(self, report: StepReport | None = None) -> list[RunSequence]:
        """The prefills of the step of `report`, or of all steps, in the plan's order."""
        reports = self.reports if report is None else [report]
        return [s for r in reports if r.details for s in r.details.ran[: r.plan.num_prefills]]

    def collect(self) -> list[Request]:
        """Take the requests that have ended since the last call; each ends once."""
        finished = self.scheduler.take_finished()
        for request in finished:
            assert request.request_id not in self.finished, "a request was finished twice"
            self.finished[request.request_id] = request
        return finished

    def run(self, max_steps: int = 10_000) -> dict[str, list[int]]:
        """Step until all requests have ended: name → the first sequence's output."""
        for _ in range(max_steps):
            if not self.scheduler.num_unfinished_requests:
                break
            self.step()
        else:
            raise AssertionError(f"requests are unfinished after {max_steps} steps")
        self.collect()
        return {name: r.sequences[0].output_token_ids for name, r in self.finished.items()}

    def outputs(self, name: str) -> list[list[int]]:
        """The outputs of a request's sequences."""
        return [seq.output_token_ids for seq in self.finished[name].sequences]


def toy_beam_search(
    prompt: list[int],
    width: int,
    max_tokens: int,
    *,
    stop_ids: Collection[int] = frozenset(),
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    max_model_len: int = 10**9,
    adapter: int = 0,
) -> list[list[int]]:
    """Beam search over whole token lists, without blocks: the best outputs, best first."""
    longest = min(max_tokens, max_model_len - len(prompt))
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    finished: list[tuple[float, float, list[int]]] = []

    def score(logprob: float, length: int) -> float:
        return float(logprob / length**length_penalty)

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
