"""The forward pass in plain torch, on a CPU or with CUDA: the twin of the native one."""

import numpy as np
import torch

from treadle.kernels import reference as kernels
from treadle.models.llama import LlamaModel
from treadle.runner.batch_inputs import BatchInputs, make_batch_inputs
from treadle.runner.kv_storage import KVStorage
from treadle.runner.row_table import IntArray
from treadle.runner.sampler import SamplingKernels, StepLogits
from treadle.runner.step_inputs import StepInputs
from treadle.runner.torch_sampling import TorchSampling
from treadle.scheduler.plan import BlockMoves


class TorchBackend:
    """Backend in torch.

    Args:
        model: weights and forward pass.
        storage: keys and values.
        int8_kv: whether keys and values are rounded to what an int8 cache would hold.
    """

    def __init__(self, model: LlamaModel, storage: KVStorage, *, int8_kv: bool = False) -> None:
        self.block_size = storage.block_size
        self.num_threads = torch.get_num_threads()
        self.sampling_kernels: SamplingKernels = TorchSampling()
        self._model = model
        self._storage = storage
        self._int8_kv = int8_kv
        self._hidden = torch.empty(0)

    @torch.inference_mode()
    def move_blocks(self, moves: BlockMoves) -> None:
        """Do a step's swaps and copies."""
        self._storage.tiers.move(moves)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs) -> None:
        """Compute all tokens of a step."""
        model = self._model
        tensors = make_batch_inputs(inputs, self._storage.block_size, model.dtype, model.device)
        attention = _PagedAttention(self._storage, tensors, self._int8_kv)
        self._hidden = model.forward(tensors.token_ids, tensors.positions, attention)  # [T, E]

    @torch.inference_mode()
    def logits(self, tokens: IntArray, wanted: IntArray) -> StepLogits:
        """Logits of all tokens asked about: which are wanted makes no difference here."""
        hidden = self._hidden[torch.from_numpy(tokens).to(self._hidden.device)]
        values = self._model.compute_logits(hidden)
        best = values.argmax(dim=-1).cpu().numpy().astype(np.int32)
        return StepLogits(values, np.arange(len(tokens), dtype=np.int32), best)


class _PagedAttention:
    """Attention over the blocks of a step's sequences."""

    def __init__(self, storage: KVStorage, inputs: BatchInputs, int8_kv: bool) -> None:
        self._storage = storage
        self._inputs = inputs
        self._int8_kv = int8_kv

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        inputs = self._inputs
        keys, values = self._storage.keys[layer], self._storage.values[layer]
        if self._int8_kv:
            head_dim = q.shape[-1]
            q, k, v = (kernels.round_to_int8(x, head_dim) for x in (q, k, v))
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
