"""The forward pass on the native CPU kernels."""

import numpy as np
import torch

from treadle.backends.block_tiers import BlockTiers
from treadle.backends.cpu.arena import Arena
from treadle.backends.cpu.library import kv_cache_struct
from treadle.backends.cpu.model import NativeModel
from treadle.backends.cpu.sampling import NativeSampling
from treadle.backends.inputs import StepInputs
from treadle.backends.protocol import SamplingKernels, StepLogits, describe_numbers
from treadle.core.request import IntArray
from treadle.scheduler.plan import BlockMoves

NO_LOGITS = torch.empty(0, 0)


def _blocks(num_blocks: int, num_bytes: int) -> torch.Tensor:
    if not num_blocks:
        return torch.empty((0, num_bytes), dtype=torch.uint8)
    size = num_blocks * num_bytes
    return torch.from_numpy(Arena(size).take(size)).view(num_blocks, num_bytes)


class CPUBackend:
    """Backend on the native kernels.

    Args:
        model: packed weights.
        block_size: slots of a KV block.
        int8_kv: whether keys and values are int8 with a scale per token and head, otherwise bfloat16.
        threads: number of threads.

    Attributes:
        pool: uint8 [num_blocks, block_bytes], the device tier, laid out by csrc/kv_cache.h.
    """

    def __init__(self, model: NativeModel, *, block_size: int, int8_kv: bool, threads: int) -> None:
        spec = model.config
        self.device = torch.device("cpu")
        self.block_size = block_size
        self.num_threads = threads
        self.sampling_kernels: SamplingKernels = NativeSampling(model.library, threads)
        self._model = model
        self._int8_kv = int8_kv
        self._struct = kv_cache_struct(
            num_layers=spec.num_hidden_layers,
            block_size=block_size,
            num_kv_heads=spec.num_key_value_heads,
            head_dim=spec.head_dim,
            int8=int8_kv,
        )
        self.block_bytes = model.library.kv_block_bytes(self._struct)
        self._vocab_size = spec.vocab_size
        self._logits = np.empty((0, self._vocab_size), dtype=np.float32)

    def allocate(self, num_blocks: int, num_host_blocks: int) -> None:
        """Allocate the two tiers of KV blocks."""
        self.pool = _blocks(num_blocks, self.block_bytes)
        self._struct.base = self.pool.data_ptr()
        self._tiers = BlockTiers((self.pool, _blocks(num_host_blocks, self.block_bytes)), block_dim=0)
        self._engine = self._model.engine(self._struct)

    def __str__(self) -> str:
        numbers = describe_numbers(self._model.describe_weights(), kv="int8" if self._int8_kv else "bfloat16")
        return f"{numbers} on {self.num_threads} threads with {self._model.library.build} kernels"

    def move_blocks(self, moves: BlockMoves) -> None:
        """Carry out a step's swaps and copies."""
        self._tiers.move(moves)

    def forward(self, inputs: StepInputs) -> None:
        """Compute all tokens of a step."""
        self._engine.forward(
            inputs.token_ids, inputs.positions, inputs.rows, inputs.block_tables, inputs.run_starts,
            inputs.run_counts, self.num_threads,
        )  # fmt: skip

    def logits(self, tokens: IntArray, wanted: IntArray) -> StepLogits:
        """The most likely token after each of `tokens`, and logits for those in `wanted`."""
        place = np.full(len(tokens), -1, dtype=np.int32)
        if not len(wanted):
            return StepLogits(NO_LOGITS, place, self._engine.logits(tokens, place, None, self.num_threads))
        if len(wanted) > len(self._logits):
            self._logits = np.empty((len(wanted), self._vocab_size), dtype=np.float32)
        values = self._logits[: len(wanted)]
        place[wanted] = np.arange(len(wanted), dtype=np.int32)
        best = self._engine.logits(tokens, place, values, self.num_threads)
        return StepLogits(torch.from_numpy(values), place, best)
