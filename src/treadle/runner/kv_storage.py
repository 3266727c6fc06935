"""The memory behind the block ids."""

import numpy as np
import torch

from treadle.models.config import ModelConfig
from treadle.scheduler import StepPlan


class KVStorage:
    """Keys and values of all layers, in slots; block b holds slots b × block_size … . Two tiers of them.

    Args:
        config: of the model.
        num_blocks, num_host_blocks, block_size: shape of the tiers.
        dtype: of keys and values.
        device: where they lie.

    Attributes:
        keys, values: of the device tier, [layers, num_slots, num_key_value_heads × head_dim].
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        num_host_blocks: int = 0,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._block_size = block_size
        layers, width = config.num_hidden_layers, config.num_key_value_heads * config.head_dim
        shape = (layers, num_blocks * block_size, width)
        host_shape = (layers, num_host_blocks * block_size, width)
        host = torch.device("cpu")
        self.keys, self.values = _zeros(shape, dtype, device), _zeros(shape, dtype, device)
        self._host_keys, self._host_values = _zeros(host_shape, dtype, host), _zeros(host_shape, dtype, host)

    def move_blocks(self, plan: StepPlan) -> None:
        """Do a step's swaps and copies: out, in, then copies."""
        device_to_host = [(self.keys, self._host_keys), (self.values, self._host_values)]
        for source, target in device_to_host:
            self._copy(source, target, plan.blocks_to_swap_out)
        for target, source in device_to_host:
            self._copy(source, target, plan.blocks_to_swap_in)
        for tensor in (self.keys, self.values):
            self._copy(tensor, tensor, plan.blocks_to_copy)

    def _copy(self, source: torch.Tensor, target: torch.Tensor, pairs: tuple[tuple[int, int], ...]) -> None:
        """Copy blocks of all layers: tensors [layers, slots, width], pairs of (source block, target block)."""
        if not pairs:
            return
        blocks = torch.tensor(pairs, dtype=torch.int64)  # [n, 2]
        layers, _, width = source.shape
        shape = (layers, -1, self._block_size, width)
        taken = source.view(shape).index_select(1, blocks[:, 0].to(source.device))
        target.view(shape).index_copy_(1, blocks[:, 1].to(target.device), taken.to(target.device))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    # The operating system hands out zero pages when they are first touched, so an unused pool costs nothing.
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
