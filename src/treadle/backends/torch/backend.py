"""The forward pass in plain torch, on a CPU or with CUDA: the counterpart of the native one."""

import numpy as np
import torch

from treadle.backends.inputs import StepInputs
from treadle.backends.protocol import SamplingKernels, StepLogits, describe_numbers
from treadle.backends.torch import reference as kernels
from treadle.backends.torch.batch_inputs import BatchInputs, make_batch_inputs
from treadle.backends.torch.kv_storage import KVStorage
from treadle.backends.torch.model import TorchModel
from treadle.backends.torch.sampling import TorchSampling
from treadle.core.request import IntArray
from treadle.scheduler.plan import BlockMoves


class TorchBackend:
    """Backend in torch.

    Args:
        model: weights and forward pass.
        block_size: slots of a KV block.
        int8_kv: whether keys and values are rounded to what an int8 cache would hold.

    Attributes:
        storage: keys and values.
    """

    def __init__(self, model: TorchModel, *, block_size: int, int8_kv: bool = False) -> None:
        self.device = model.device
        self.block_size = block_size
        self.block_bytes = block_size * model.config.kv_bytes_per_token(model.dtype.itemsize)
        self.num_threads = torch.get_num_threads()
        self.sampling_kernels: SamplingKernels = TorchSampling()
        self._model = model
        self._int8_kv = int8_kv
        self._hidden = torch.empty(0)

    def allocate(self, num_blocks: int, num_host_blocks: int) -> None:
        """Allocate the two tiers of KV blocks."""
        self.storage = KVStorage(
            self._model.config,
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            block_size=self.block_size,
            dtype=self._model.dtype,
            device=self._model.device,
        )

    def __str__(self) -> str:
        name = str(self._model.dtype).removeprefix("torch.")
        numbers = describe_numbers("int8" if self._model.int8 else name, kv="int8" if self._int8_kv else name)
        return f"{numbers} on {self.device.type} with torch"

    @torch.inference_mode()
    def move_blocks(self, moves: BlockMoves) -> None:
        """Carry out a step's swaps and copies."""
        self.storage.tiers.move(moves)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs) -> None:
        """Compute all tokens of a step."""
        model = self._model
        tensors = make_batch_inputs(inputs, self.storage.block_size, model.dtype, model.device)
        attention = _PagedAttention(self.storage, tensors, self._int8_kv)
        self._hidden = model.forward(tensors.token_ids, tensors.positions, attention)  # [T, E]

    @torch.inference_mode()
    def logits(self, tokens: IntArray, wanted: IntArray) -> StepLogits:
        """Logits after all of `tokens`; `wanted` makes no difference here."""
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
