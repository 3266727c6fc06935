"""Moving KV blocks: between the device and the host tier, and within the device tier."""

import torch

from treadle.scheduler import StepPlan


class BlockTiers:
    """Pairs of tensors that hold the same kind of data in the two tiers.

    Args:
        pairs: (device tensor, host tensor).
        block_dim: of their dimensions, the one that counts blocks.
    """

    def __init__(self, *pairs: tuple[torch.Tensor, torch.Tensor], block_dim: int) -> None:
        self._pairs = pairs
        self._block_dim = block_dim

    def move(self, plan: StepPlan) -> None:
        """Do a step's swaps and copies: out, in, then copies."""
        for device, host in self._pairs:
            self._copy(device, host, plan.blocks_to_swap_out)
            self._copy(host, device, plan.blocks_to_swap_in)
            self._copy(device, device, plan.blocks_to_copy)

    def _copy(self, source: torch.Tensor, target: torch.Tensor, pairs: tuple[tuple[int, int], ...]) -> None:
        """Copy blocks of all layers, one after the other; pairs of (source block, target block).

        Gathering them first would be slower by far: it passes through fresh memory.
        """
        for taken, given in pairs:
            target.select(self._block_dim, given).copy_(source.select(self._block_dim, taken))
