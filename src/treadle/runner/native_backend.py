"""The forward pass on the native CPU kernels."""

import numpy as np
import torch

from treadle.kernels.cpu.arena import Arena
from treadle.kernels.cpu.library import kv_cache_struct
from treadle.models.native import NativeModel
from treadle.runner.block_tiers import BlockTiers
from treadle.runner.native_sampling import NativeSampling
from treadle.runner.row_table import IntArray
from treadle.runner.sampler import SamplingKernels, StepLogits
from treadle.runner.step_inputs import StepInputs
from treadle.scheduler.plan import BlockMoves

NO_LOGITS = torch.empty(0, 0)


class NativeKVStorage:
    """The native KV cache: two tiers of blocks, laid out by csrc/kv_cache.h.

    Args:
        model: whose kernels read it.
        num_blocks, num_host_blocks, block_size: shape of the tiers.
        int8: whether keys and values are int8 with a scale per token and head; else bfloat16.

    Attributes:
        block_size: slots of a block.
        pool: uint8 [num_blocks, bytes], of the device tier.
        struct: what the kernels know of it.
        tiers: moves blocks.
    """

    def __init__(
        self, model: NativeModel, *, num_blocks: int, num_host_blocks: int = 0, block_size: int, int8: bool
    ) -> None:
        config = model.config
        self.block_size = block_size
        self.struct = kv_cache_struct(
            num_layers=config.num_hidden_layers,
            block_size=block_size,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            int8=int8,
        )
        num_bytes = model.library.kv_block_bytes(self.struct)
        self.pool = _blocks(num_blocks, num_bytes)
        host = _blocks(num_host_blocks, num_bytes)
        self.struct.base = self.pool.data_ptr()
        self.tiers = BlockTiers((self.pool, host), block_dim=0)


def _blocks(num_blocks: int, num_bytes: int) -> torch.Tensor:
    if not num_blocks:
        return torch.empty((0, num_bytes), dtype=torch.uint8)
    size = num_blocks * num_bytes
    return torch.from_numpy(Arena(size).take(size)).view(num_blocks, num_bytes)


class NativeBackend:
    """Backend in C++.

    Args:
        model: packed weights.
        storage: keys and values.
        threads: how many compute.
    """

    def __init__(self, model: NativeModel, storage: NativeKVStorage, *, threads: int) -> None:
        self.block_size = storage.block_size
        self.num_threads = threads
        self.sampling_kernels: SamplingKernels = NativeSampling(model.library, threads)
        self._storage = storage
        self._engine = model.engine(storage.struct)
        self._vocab_size = model.config.vocab_size
        self._logits = np.empty((0, self._vocab_size), dtype=np.float32)

    def move_blocks(self, moves: BlockMoves) -> None:
        """Do a step's swaps and copies."""
        self._storage.tiers.move(moves)

    def forward(self, inputs: StepInputs) -> None:
        """Compute all tokens of a step."""
        self._engine.forward(
            inputs.token_ids, inputs.positions, inputs.rows, inputs.block_tables, inputs.run_starts,
            inputs.run_counts, self.num_threads,
        )  # fmt: skip

    def logits(self, tokens: IntArray, wanted: IntArray) -> StepLogits:
        """The best token after each of the tokens asked about, and logits for those wanted."""
        place = np.full(len(tokens), -1, dtype=np.int32)
        if not len(wanted):
            return StepLogits(NO_LOGITS, place, self._engine.logits(tokens, place, None, self.num_threads))
        if len(wanted) > len(self._logits):
            self._logits = np.empty((len(wanted), self._vocab_size), dtype=np.float32)
        values = self._logits[: len(wanted)]
        place[wanted] = np.arange(len(wanted), dtype=np.int32)
        best = self._engine.logits(tokens, place, values, self.num_threads)
        return StepLogits(torch.from_numpy(values), place, best)
