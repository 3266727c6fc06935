"""The forward pass on the native CPU kernels."""

import numpy as np
import torch

from treadle.kernels.cpu.arena import Arena
from treadle.kernels.cpu.library import kv_cache_struct
from treadle.models.native import NativeModel
from treadle.request import IntArray
from treadle.runner.block_tiers import BlockTiers
from treadle.runner.native_sampling import NativeSampling
from treadle.runner.sampler import Sampler, StepLogits
from treadle.scheduler import StepPlan

NO_LOGITS = torch.empty(0, 0)


class NativeKVStorage:
    """The native KV cache: two tiers of blocks, laid out by csrc/kv_cache.h.

    Args:
        model: whose kernels read it.
        num_blocks, num_host_blocks, block_size: shape of the tiers.
        int8: whether keys and values are int8 with a scale per token and head; else bfloat16.

    Attributes:
        pool: uint8 [num_blocks, bytes], of the device tier.
        struct: what the kernels know of it.
        tiers: moves blocks.
    """

    def __init__(
        self, model: NativeModel, *, num_blocks: int, num_host_blocks: int = 0, block_size: int, int8: bool
    ) -> None:
        config = model.config
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
        self.sampler = Sampler(NativeSampling(model.library, threads), threads)
        self._storage = storage
        self._engine = model.engine(storage.struct)
        self._threads = threads
        self._vocab_size = model.config.vocab_size
        self._logits = np.empty((0, self._vocab_size), dtype=np.float32)

    def move_blocks(self, plan: StepPlan) -> None:
        """Do a step's swaps and copies."""
        self._storage.tiers.move(plan)

    def forward(self, plan: StepPlan) -> None:
        """Compute all tokens of a step."""
        batch, decodes = plan.batch, plan.decode_rows
        if plan.sequences:
            counts = np.array([s.count for s in plan.sequences], dtype=np.int32)
            rows = np.concatenate([np.repeat(np.array([s.row for s in plan.sequences], np.int32), counts), decodes])
            positions = np.concatenate(
                [np.arange(s.start, s.start + s.count, dtype=np.int32) for s in plan.sequences]
                + [batch.num_computed_tokens[decodes]]
            )
            run_count = np.concatenate([counts, np.ones(len(decodes), dtype=np.int32)])
            run_start = np.zeros(len(run_count), dtype=np.int32)
            np.cumsum(run_count[:-1], out=run_start[1:])
        else:
            rows, positions = decodes, batch.num_computed_tokens[decodes]
            run_start, run_count = np.arange(len(rows), dtype=np.int32), np.ones(len(rows), dtype=np.int32)
        token_ids = batch.token_ids[rows, positions]
        self._engine.forward(token_ids, positions, rows, plan.block_tables, run_start, run_count, self._threads)

    def logits(self, tokens: IntArray, wanted: IntArray) -> StepLogits:
        """The best token after each of the tokens asked about, and logits for those wanted."""
        place = np.full(len(tokens), -1, dtype=np.int32)
        if not len(wanted):
            return StepLogits(NO_LOGITS, place, self._engine.logits(tokens, place, None, self._threads))
        if len(wanted) > len(self._logits):
            self._logits = np.empty((len(wanted), self._vocab_size), dtype=np.float32)
        values = self._logits[: len(wanted)]
        place[wanted] = np.arange(len(wanted), dtype=np.int32)
        best = self._engine.logits(tokens, place, values, self._threads)
        return StepLogits(torch.from_numpy(values), place, best)
