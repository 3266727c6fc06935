"""Moves KV blocks: between the device and the host tier, and within the device tier."""

from collections.abc import Iterable

import torch

from treadle.scheduler.plan import BlockMoves


class BlockTiers:
    """Pairs of tensors that hold the same kind of data in the two tiers.

    Args:
        pairs: (device tensor, host tensor).
        block_dim: the dimension that counts blocks.
    """

    def __init__(self, *pairs: tuple[torch.Tensor, torch.Tensor], block_dim: int) -> None:
        self._pairs = pairs
        self._block_dim = block_dim

    def move(self, moves: BlockMoves) -> None:
        """Carry out a step's swaps and copies, in this order: out, in, copies."""
        for device, host in self._pairs:
            copy_blocks(device, host, moves.swap_out, block_dim=self._block_dim)
            copy_blocks(host, device, moves.swap_in, block_dim=self._block_dim)
            copy_blocks(device, device, moves.copy, block_dim=self._block_dim)


def copy_blocks(
    source: torch.Tensor, target: torch.Tensor, pairs: Iterable[tuple[int, int]], *, block_dim: int
) -> None:
    """Copy blocks one by one. Gathering them first is far slower, because it goes through newly allocated memory.

    Args:
        source, target: of the same shape, except for the number of blocks.
        pairs: (source block, target block).
        block_dim: the dimension that counts blocks.
    """
    for taken, given in pairs:
        target.select(block_dim, given).copy_(source.select(block_dim, taken))
