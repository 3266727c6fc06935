"""Moving KV blocks: between the device and the host tier, and within the device tier."""

import torch

from treadle.scheduler import StepPlan


class BlockTiers:
    """Pairs of tensors that hold the same kind of data in the two tiers.

    Args:
        pairs: (device tensor, host tensor), each [layers, blocks, …].
    """

    def __init__(self, *pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._pairs = pairs

    def move(self, plan: StepPlan) -> None:
        """Do a step's swaps and copies: out, in, then copies."""
        for device, host in self._pairs:
            _copy(device, host, plan.blocks_to_swap_out)
            _copy(host, device, plan.blocks_to_swap_in)
            _copy(device, device, plan.blocks_to_copy)


def _copy(source: torch.Tensor, target: torch.Tensor, pairs: tuple[tuple[int, int], ...]) -> None:
    """Copy blocks of all layers; pairs of (source block, target block)."""
    if not pairs:
        return
    blocks = torch.tensor(pairs, dtype=torch.int64)  # [n, 2]
    taken = source.index_select(1, blocks[:, 0].to(source.device))
    target.index_copy_(1, blocks[:, 1].to(target.device), taken.to(target.device))
