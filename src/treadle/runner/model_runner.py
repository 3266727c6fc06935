"""Computes a StepPlan: one forward pass over all of its tokens, then a token where one is wanted."""

from dataclasses import replace

import numpy as np

from treadle.request import IntArray
from treadle.runner.backend import Backend
from treadle.scheduler import ScheduledSequence, SequenceResult, StepPlan, StepResult, TokenLogprobs

PROMPT_LOGPROBS_AT_ONCE = 32
"""Prompt positions whose logits are held at the same time."""


class ModelRunner:
    """Runs steps on a model. It computes no LoRA adapters yet, and drafts no tokens.

    Args:
        backend: computes the forward pass.
    """

    supports_lora = False

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step."""
        if plan.num_lookahead_slots:
            raise NotImplementedError("this runner has no drafter: num_lookahead_slots must be 0")
        self._backend.move_blocks(plan)
        if plan.is_empty:
            return StepResult.nothing()
        self._backend.forward(plan)
        result = self._answer(plan)
        errors = self._backend.sampler.grammar_masks.take_errors()
        return replace(result, errors=errors) if errors else result

    def _answer(self, plan: StepPlan) -> StepResult:
        """Sample what the plan asks for."""
        if not plan.sequences:
            rows = plan.decode_rows
            tokens = np.arange(len(rows), dtype=np.int32)
            token_ids, logprobs = self._sample(plan, tokens, rows, plan.batch.sampling.sequence_index[rows])
            return StepResult((), token_ids, logprobs={int(rows[k]): entry for k, entry in logprobs.items()})
        return self._answer_sequences(plan)

    def _sample(
        self, plan: StepPlan, tokens: IntArray, rows: IntArray, sequence_index: IntArray
    ) -> tuple[IntArray, dict[int, TokenLogprobs]]:
        """Sample after each of the step's `tokens`, for the given rows and sequences of their requests."""
        if not len(tokens):
            return tokens, {}
        wanted = plan.batch.sampling.needs_logits[rows].nonzero()[0].astype(np.int32)
        logits = self._backend.logits(tokens, wanted)
        return self._backend.sampler.sample(logits, plan.batch, rows, sequence_index)

    def _answer_sequences(self, plan: StepPlan) -> StepResult:
        """The answers of a step that has more than plain decodes."""
        ends = np.cumsum([s.count for s in plan.sequences], dtype=np.int32) - np.int32(1)
        answers = [SequenceResult() for _ in plan.sequences]
        tokens: list[int] = []
        rows: list[int] = []
        indices: list[int] = []  # of the sequence in its request
        beams = []
        for i, s in enumerate(plan.sequences):
            if s.num_candidates:
                beams.append(i)
            elif s.num_samples:
                own = plan.batch.sequences[s.row].index
                tokens += [int(ends[i])] * s.num_samples
                rows += [s.row] * s.num_samples
                indices += [own] if s.num_samples == 1 else range(s.num_samples)
        first_decode = int(ends[-1]) + 1
        decodes = plan.decode_rows
        token_ids, logprobs = self._sample(
            plan,
            np.concatenate([tokens, np.arange(first_decode, first_decode + len(decodes))]).astype(np.int32),
            np.concatenate([rows, decodes]).astype(np.int32),
            np.concatenate([indices, plan.batch.sampling.sequence_index[decodes]]).astype(np.int32),
        )
        start = 0
        for i, s in enumerate(plan.sequences):
            if s.num_samples and not s.num_candidates:
                end = start + s.num_samples
                answers[i] = SequenceResult(
                    token_ids=tuple(token_ids[start:end].tolist()),
                    logprobs=tuple(logprobs[k] for k in range(start, end) if k in logprobs),
                )
                start = end
        if beams:
            self._find_candidates(plan, beams, ends, answers)
        for i, s in enumerate(plan.sequences):
            entries = self._prompt_logprobs(plan, s, int(ends[i]) + 1 - s.count)
            if entries:
                answers[i] = replace(answers[i], prompt_logprobs=entries)
        decode_logprobs = {int(decodes[k - start]): entry for k, entry in logprobs.items() if k >= start}
        return StepResult(tuple(answers), token_ids[start:], logprobs=decode_logprobs)

    def _find_candidates(
        self, plan: StepPlan, beams: list[int], ends: IntArray, answers: list[SequenceResult]
    ) -> None:
        """Fill in the answers of the sequences numbered `beams`."""
        logits = self._backend.logits(ends[beams], np.arange(len(beams), dtype=np.int32))
        for k, i in enumerate(beams):
            s = plan.sequences[i]
            found = self._backend.sampler.candidates(logits.values[k], plan.batch, s.row, s.num_candidates)
            answers[i] = SequenceResult(candidates=found)

    def _prompt_logprobs(self, plan: StepPlan, s: ScheduledSequence, first: int) -> tuple[TokenLogprobs, ...]:
        """For the prompt's tokens after each computed position, if the request asked.

        Args:
            plan: the step.
            s: the part of a prompt.
            first: number of the part's first token among the step's.
        """
        seq = plan.batch.sequences[s.row]
        num_top = seq.request.sampling_params.prompt_logprobs
        # The token after the last one of the prompt is an output.
        count = min(s.count, seq.num_prompt_tokens - 1 - s.start)
        if num_top is None or count <= 0:
            return ()
        entries: list[TokenLogprobs] = []
        for start in range(0, count, PROMPT_LOGPROBS_AT_ONCE):
            places = np.arange(min(PROMPT_LOGPROBS_AT_ONCE, count - start), dtype=np.int32)
            logits = self._backend.logits(places + np.int32(first + start), places)
            next_tokens = seq.token_ids[s.start + start + 1 :][: len(places)].copy()
            tops = np.full(len(places), num_top, dtype=np.int32)
            entries += self._backend.sampler.report(logits.values, logits.place, next_tokens, tops)
        return tuple(entries)
