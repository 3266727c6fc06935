"""Computes a StepPlan: one forward pass over all of its tokens, then a token where one is wanted."""

import numpy as np
import torch

from treadle.kernels import reference as kernels
from treadle.models.llama import LlamaModel
from treadle.runner.batch_inputs import BatchInputs, make_batch_inputs
from treadle.runner.kv_storage import KVStorage
from treadle.runner.sampler import Sampler, token_logprobs
from treadle.scheduler import ScheduledSequence, SequenceResult, StepPlan, StepResult, TokenLogprobs


class ModelRunner:
    """Runs steps on a model.

    Args:
        model: weights and forward pass.
        storage: keys and values.
        block_size: slots of a block.
    """

    def __init__(self, model: LlamaModel, storage: KVStorage, block_size: int) -> None:
        self._model = model
        self._storage = storage
        self._block_size = block_size
        self._sampler = Sampler()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step."""
        model = self._model
        inputs = make_batch_inputs(plan, self._block_size, model.dtype, model.device)
        attention = _PagedAttention(self._storage, inputs)
        hidden = model.forward(inputs.token_ids, inputs.positions, attention)  # [T, E]
        first_decode = sum(s.count for s in plan.sequences)
        prompt_ends = np.cumsum([s.count for s in plan.sequences], dtype=np.int64) - 1
        sampled = [i for i, s in enumerate(plan.sequences) if s.num_samples]
        rows = np.concatenate(
            [np.array([plan.sequences[i].row for i in sampled], dtype=np.int32), plan.decode_rows]
        )
        token_ids = np.empty(0, dtype=np.int32)
        logprobs: dict[int, TokenLogprobs] = {}
        if len(rows):
            # Only positions that somebody samples go through the vocabulary.
            positions = np.concatenate(
                [prompt_ends[sampled], np.arange(first_decode, first_decode + len(plan.decode_rows))]
            ).astype(np.int64)
            logits = model.compute_logits(hidden[torch.from_numpy(positions).to(model.device)])
            token_ids, logprobs = self._sampler.sample(logits, plan.batch, rows)
        answers = [SequenceResult() for _ in plan.sequences]
        for k, i in enumerate(sampled):
            answers[i] = SequenceResult(token_ids=(int(token_ids[k]),))
        for i, s in enumerate(plan.sequences):
            entries = self._prompt_logprobs(plan, s, hidden, int(prompt_ends[i]) + 1 - s.count)
            if entries:
                answers[i] = SequenceResult(answers[i].token_ids, entries)
        return StepResult(tuple(answers), token_ids[len(sampled) :], logprobs)

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
