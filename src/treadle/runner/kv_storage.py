"""The memory behind the block ids."""

import numpy as np
import torch

from treadle.models.config import ModelConfig


class KVStorage:
    """Keys and values of all layers, in slots; block b holds slots b × block_size … .

    Args:
        config: of the model.
        num_blocks, block_size: shape of the pool.
        dtype: of keys and values.
        device: where they lie.

    Attributes:
        keys, values: one [num_slots, num_key_value_heads × head_dim] per layer.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (
            config.num_hidden_layers,
            num_blocks * block_size,
            config.num_key_value_heads * config.head_dim,
        )
        self.keys = _zeros(shape, dtype, device)
        self.values = _zeros(shape, dtype, device)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # The operating system hands out zero pages when they are first touched, so an unused pool costs nothing.
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
