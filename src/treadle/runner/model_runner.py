"""Computes a StepPlan: one forward pass over all of its tokens, then sampling where the plan asks for it."""

from collections.abc import Callable

import numpy as np

from treadle.backends.inputs import StepInputs
from treadle.backends.protocol import Backend
from treadle.core.request import IntArray
from treadle.runner.grammar_masks import RowErrors
from treadle.runner.row_table import RowTable
from treadle.runner.sampler import Sampler
from treadle.runner.step_inputs import flatten
from treadle.scheduler.plan import StepPlan, StepResult, TokenLogprobs
from treadle.text.grammar import Grammar

Candidates = dict[int, tuple[tuple[int, float], ...]]
"""Entry of the plan → (token, log-probability), best first."""

PROMPT_LOGPROBS_AT_ONCE = 32
"""Prompt positions whose logits are held at the same time."""


class ModelRunner:
    """Runs steps on a model. LoRA adapters and draft tokens are not supported yet.

    It knows about sequences only what plans have said, see RowTable.

    Args:
        backend: computes the forward pass.
        max_num_seqs, max_model_len: the scheduler's.
        find_grammar: text of a grammar → the compiled grammar.
    """

    supports_lora = False

    def __init__(
        self, backend: Backend, *, max_num_seqs: int, max_model_len: int, find_grammar: Callable[[str], Grammar]
    ) -> None:
        self._backend = backend
        self._table = RowTable(max_num_seqs, max_model_len, backend.block_size)
        self._sampler = Sampler(backend.sampling_kernels, find_grammar, backend.num_threads)

    @property
    def backend(self) -> Backend:
        """The backend that computes the forward pass."""
        return self._backend

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step."""
        if len(plan.drafts):
            raise NotImplementedError("this runner does not support drafts: it neither proposes nor checks any")
        self._table.take(plan)
        self._backend.move_blocks(plan.moves)
        if plan.is_empty:
            return StepResult.nothing()
        inputs = flatten(plan, self._table)
        self._backend.forward(inputs)
        if plan.num_prefills or plan.candidates is not None:
            return self._answer(plan, inputs)
        sequence_index = self._table.sampling.sequence_index[plan.rows]
        token_ids, logprobs, errors = self._sample(inputs.run_ends, plan.rows, sequence_index)
        self._table.append(plan.rows, token_ids)
        return StepResult(token_ids, logprobs=logprobs, errors=errors)

    def _answer(self, plan: StepPlan, inputs: StepInputs) -> StepResult:
        """The answer to a step that has more than plain decodes."""
        samples = plan.samples
        first = samples.cumsum() - samples
        rows = np.repeat(plan.rows, samples)
        sequence_index = self._table.sampling.sequence_index[rows]
        # A prompt forks: one token for each sequence of its request.
        for entry in np.flatnonzero(samples > 1).tolist():
            sequence_index[first[entry] : first[entry] + samples[entry]] = np.arange(samples[entry])
        token_ids, logprobs, errors = self._sample(np.repeat(inputs.run_ends, samples), rows, sequence_index)
        candidates: Candidates = {}
        if plan.candidates is not None:
            candidates, beam_errors = self._find_candidates(plan.rows, plan.candidates, inputs)
            errors += beam_errors
        prompt_logprobs = {}
        for entry in range(plan.num_prefills):
            entries = self._prompt_logprobs(inputs, entry)
            if entries:
                prompt_logprobs[entry] = entries
        sampled = np.flatnonzero(samples)
        # The other sequences of a fork are new rows of the next plan.
        self._table.append(plan.rows[sampled], token_ids[first[sampled]])
        return StepResult(
            token_ids, logprobs=logprobs, candidates=candidates, prompt_logprobs=prompt_logprobs, errors=errors
        )

    def _sample(
        self, tokens: IntArray, rows: IntArray, sequence_index: IntArray
    ) -> tuple[IntArray, dict[int, TokenLogprobs], RowErrors]:
        """Sample after each of the step's `tokens`, for the given rows and sequences of their requests."""
        if not len(tokens):
            return tokens, {}, ()
        wanted = self._table.sampling.needs_logits[rows].nonzero()[0].astype(np.int32)
        logits = self._backend.logits(tokens, wanted)
        return self._sampler.sample(logits, self._table, rows, sequence_index)

    def _find_candidates(self, rows: IntArray, counts: IntArray, inputs: StepInputs) -> tuple[Candidates, RowErrors]:
        """The most likely next tokens of the entries that ask for some, and the rows that cannot go on."""
        asking = np.flatnonzero(counts)
        if not len(asking):
            return {}, ()
        logits = self._backend.logits(inputs.run_ends[asking], np.arange(len(asking), dtype=np.int32))
        candidates: Candidates = {}
        errors: RowErrors = ()
        for k, entry in enumerate(asking.tolist()):
            row, count = int(rows[entry]), int(counts[entry])
            candidates[entry], more = self._sampler.candidates(logits.values[k], self._table, row, count)
            errors += more
        return candidates, errors

    def _prompt_logprobs(self, inputs: StepInputs, run: int) -> tuple[TokenLogprobs, ...]:
        """For the prompt's tokens after each computed position, if the request asks for them."""
        table, row, first = self._table, int(inputs.run_rows[run]), int(inputs.run_starts[run])
        params = table.params[row]
        assert params is not None
        position = int(inputs.positions[first])
        # The token after the last one of the prompt is an output.
        count = min(int(inputs.run_counts[run]), int(table.num_prompt_tokens[row]) - 1 - position)
        if params.prompt_logprobs is None or count <= 0:
            return ()
        entries: list[TokenLogprobs] = []
        for start in range(0, count, PROMPT_LOGPROBS_AT_ONCE):
            places = np.arange(min(PROMPT_LOGPROBS_AT_ONCE, count - start), dtype=np.int32)
            logits = self._backend.logits(places + np.int32(first + start), places)
            next_tokens = table.token_ids[row, position + start + 1 :][: len(places)].copy()
            tops = np.full(len(places), params.prompt_logprobs, dtype=np.int32)
            entries += self._sampler.report(logits.values, logits.place, next_tokens, tops)
        return tuple(entries)
