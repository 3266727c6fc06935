"""Which blocks of KV memory belong to whom. Knows block ids, never tensors; imports no torch."""

from treadle.kvcache.block_pool import BlockPool
from treadle.kvcache.manager import AllocationPlan, AllocStatus, BlockPairs, KVCacheManager
from treadle.kvcache.prefix_index import PrefixIndex

__all__ = ["AllocStatus", "AllocationPlan", "BlockPairs", "BlockPool", "KVCacheManager", "PrefixIndex"]
