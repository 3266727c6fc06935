"""Computes a StepPlan: one forward pass over all of its tokens, then a token where one is wanted."""

from dataclasses import replace

import numpy as np
import torch

from treadle.kernels import reference as kernels
from treadle.models.llama import LlamaModel
from treadle.request import IntArray
from treadle.runner.batch_inputs import BatchInputs, make_batch_inputs
from treadle.runner.kv_storage import KVStorage
from treadle.runner.sampler import Sampler, token_logprobs
from treadle.scheduler import ScheduledSequence, SequenceResult, StepPlan, StepResult, TokenLogprobs


class ModelRunner:
    """Runs steps on a model. It computes no LoRA adapters yet, and drafts no tokens.

    Args:
        model: weights and forward pass.
        storage: keys and values.
        block_size: slots of a block.
    """

    supports_lora = False

    def __init__(self, model: LlamaModel, storage: KVStorage, block_size: int) -> None:
        self._model = model
        self._storage = storage
        self._block_size = block_size
        self._sampler = Sampler()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step."""
        if plan.num_lookahead_slots:
            raise NotImplementedError("this runner has no drafter: num_lookahead_slots must be 0")
        self._storage.move_blocks(plan)
        if plan.is_empty:
            return StepResult.nothing()
        model = self._model
        inputs = make_batch_inputs(plan, self._block_size, model.dtype, model.device)
        attention = _PagedAttention(self._storage, inputs)
        hidden = model.forward(inputs.token_ids, inputs.positions, attention)  # [T, E]
        first_decode = sum(s.count for s in plan.sequences)
        ends = np.cumsum([s.count for s in plan.sequences], dtype=np.int64) - 1
        decodes = np.arange(first_decode, first_decode + len(plan.decode_rows))
        # Only positions that somebody asks about go through the vocabulary, each once.
        asked = [i for i, s in enumerate(plan.sequences) if s.num_samples or s.num_candidates]
        positions = np.concatenate([ends[asked], decodes]).astype(np.int64)
        logits = hidden[:0]
        if len(positions):
            logits = model.compute_logits(hidden[torch.from_numpy(positions).to(model.device)])
        answers, decode_token_ids, logprobs = self._choose(plan, asked, logits)
        for i, s in enumerate(plan.sequences):
            entries = self._prompt_logprobs(plan, s, hidden, int(ends[i]) + 1 - s.count)
            if entries:
                answers[i] = replace(answers[i], prompt_logprobs=entries)
        return StepResult(tuple(answers), decode_token_ids, logprobs=logprobs)

    def _choose(
        self, plan: StepPlan, asked: list[int], logits: torch.Tensor
    ) -> tuple[list[SequenceResult], IntArray, dict[int, TokenLogprobs]]:
        """The answers for the plan's sequences, and the plain decodes' tokens and log-probabilities by row.

        Args:
            plan: the step.
            asked: numbers of the sequences that want tokens or candidates.
            logits: float32 [len(asked) + plain decodes, V].
        """
        answers = [SequenceResult() for _ in plan.sequences]
        places: list[int] = []  # of the logits, one per token to sample
        indices: list[int] = []  # for which sequence of the request
        for k, i in enumerate(asked):
            s = plan.sequences[i]
            if s.num_candidates:
                found = self._sampler.candidates(logits[k], plan.batch, s.row, s.num_candidates)
                answers[i] = SequenceResult(candidates=found)
            else:
                own = plan.batch.sequences[s.row].index
                places += [k] * s.num_samples
                indices += [own] if s.num_samples == 1 else range(s.num_samples)
        num_first = len(places)
        decode_places = np.arange(len(asked), len(asked) + len(plan.decode_rows))
        rows_of = np.array([plan.sequences[i].row for i in asked], dtype=np.int32)
        rows = np.concatenate([rows_of[places], plan.decode_rows])
        if not len(rows):
            return answers, plan.decode_rows, {}
        if num_first != len(asked):
            order = np.concatenate([places, decode_places]).astype(np.int64)
            logits = logits[torch.from_numpy(order).to(logits.device)]
        decode_indices = plan.batch.sampling.sequence_index[plan.decode_rows]
        sequence_index = np.concatenate([np.array(indices, dtype=np.int32), decode_indices])
        token_ids, logprobs = self._sampler.sample(logits, plan.batch, rows, sequence_index)
        start = 0
        for i in asked:
            count = plan.sequences[i].num_samples
            if count:
                answers[i] = SequenceResult(
                    token_ids=tuple(token_ids[start : start + count].tolist()),
                    logprobs=tuple(logprobs[k] for k in range(start, start + count) if k in logprobs),
                )
                start += count
        decode_logprobs = {int(rows[k]): value for k, value in logprobs.items() if k >= num_first}
        return answers, token_ids[num_first:], decode_logprobs

    def _prompt_logprobs(
        self, plan: StepPlan, s: ScheduledSequence, hidden: torch.Tensor, first: int
    ) -> tuple[TokenLogprobs, ...]:
        """For the prompt's tokens after each computed position, if the request asked.

        Args:
            plan: the step.
            s: the part of a prompt.
            hidden: [T, E], of the step.
            first: where the part's tokens lie among the step's.
        """
        seq = plan.batch.sequences[s.row]
        num_top = seq.request.sampling_params.prompt_logprobs
        # The token after the last one of the prompt is an output.
        count = min(s.count, seq.num_prompt_tokens - 1 - s.start)
        if num_top is None or count <= 0:
            return ()
        entries = []
        for i in range(count):
            logits = self._model.compute_logits(hidden[first + i : first + i + 1])
            next_token = int(seq.token_ids[s.start + i + 1])
            entries.append(token_logprobs(logits[0].log_softmax(dim=-1), next_token, num_top))
        return tuple(entries)


class _PagedAttention:
    """Attention over the blocks of a step's sequences."""

    def __init__(self, storage: KVStorage, inputs: BatchInputs) -> None:
        self._storage = storage
        self._inputs = inputs

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        inputs = self._inputs
        keys, values = self._storage.keys[layer], self._storage.values[layer]
        kernels.store_kv(keys, k, inputs.slots)
        kernels.store_kv(values, v, inputs.slots)
        out = torch.empty_like(q)  # [T, H, D]
        for p in inputs.prefills:
            out[p.start : p.end] = kernels.prefill_attention(
                q[p.start : p.end], keys, values, p.context_slots, p.mask
            )
        for d in inputs.decodes:
            out[d.tokens] = kernels.decode_attention(q[d.tokens], keys, values, d.context_slots, d.mask)
        return out.flatten(1)
