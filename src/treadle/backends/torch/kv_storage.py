"""The memory of the KV blocks, for plain torch."""

import numpy as np
import torch

from treadle.backends.block_tiers import BlockTiers
from treadle.models.spec import ModelSpec


class KVStorage:
    """Keys and values of all layers, in two tiers of slots. Block b starts at slot b × block_size.

    Args:
        config: of the model.
        num_blocks, num_host_blocks, block_size: shape of the tiers.
        dtype: of keys and values.
        device: of the device tier.

    Attributes:
        keys, values: of the device tier, [layers, num_slots, num_key_value_heads × head_dim].
        block_size: slots of a block.
        tiers: moves blocks.
    """

    def __init__(
        self,
        config: ModelSpec,
        *,
        num_blocks: int,
        num_host_blocks: int = 0,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        layers, width = config.num_hidden_layers, config.num_key_value_heads * config.head_dim
        shape = (layers, num_blocks, block_size, width)
        host_shape = (layers, num_host_blocks, block_size, width)
        host = torch.device("cpu")
        keys, values = _zeros(shape, dtype, device), _zeros(shape, dtype, device)
        self.tiers = BlockTiers(
            (keys, _zeros(host_shape, dtype, host)), (values, _zeros(host_shape, dtype, host)), block_dim=1
        )
        self.keys, self.values = keys.flatten(1, 2), values.flatten(1, 2)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    # The operating system provides zero pages when they are first touched, so an unused pool costs nothing.
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
