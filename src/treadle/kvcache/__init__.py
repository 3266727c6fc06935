"""Ownership of KV blocks: which sequence holds which block. Knows block ids, never tensors; imports no torch."""

from treadle.kvcache.allocation import AllocationPlan, AllocStatus
from treadle.kvcache.block_pool import BlockPool
from treadle.kvcache.manager import BlockPairs, KVCacheManager
from treadle.kvcache.prefix_index import PrefixIndex

__all__ = ["AllocStatus", "AllocationPlan", "BlockPairs", "BlockPool", "KVCacheManager", "PrefixIndex"]
