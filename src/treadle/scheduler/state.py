"""The scheduler's state: queues, rows and blocks. Plain data; the transitions are in lifecycle.py."""

from dataclasses import dataclass, field

from treadle.core.clock import Clock
from treadle.core.config import SchedulerConfig
from treadle.core.request import Request
from treadle.kvcache import KVCacheManager
from treadle.scheduler.batch import RunningBatch
from treadle.scheduler.beams import BeamSearch
from treadle.scheduler.policies.active import ActivePolicies
from treadle.scheduler.queue import RankedQueue


@dataclass(frozen=True, slots=True)
class BlockRefusal:
    """The conditions under which a request was refused for lack of blocks; see `guards.is_no_better`."""

    request: Request
    num_available_blocks: int
    num_running: int
    cache_version: int


@dataclass(slots=True)
class SchedulerState:
    """Queues, rows and blocks.

    Attributes:
        config, clock, kv, batch, policies: collaborators that the phases use.
        waiting, swapped: queues in rank order; the batch is the running queue.
        requests: request id → unfinished request.
        finished: request id → request that has ended and that `take_finished` has not returned yet; its id is still
            in use.
        beams: the searches of the unfinished requests that use beam search.
        adapters: LoRA adapter id → number of running requests that use it.
        num_cached_tokens: prompt tokens found in the prefix cache, over the requests admitted in the current step.
        step: number of the latest step.
        block_refusal: the last refusal of the first waiting request for lack of blocks.
        vain_displacement: the last refusal to displace for the first waiting request, because preempting all
            running requests of worse priority would not have made enough room.
    """

    config: SchedulerConfig
    clock: Clock
    kv: KVCacheManager
    batch: RunningBatch
    policies: ActivePolicies
    waiting: RankedQueue = field(default_factory=RankedQueue)
    swapped: RankedQueue = field(default_factory=RankedQueue)
    requests: dict[str, Request] = field(default_factory=dict)
    finished: dict[str, Request] = field(default_factory=dict)
    beams: dict[Request, BeamSearch] = field(default_factory=dict)
    adapters: dict[int, int] = field(default_factory=dict)
    num_cached_tokens: int = 0
    step: int = 0
    block_refusal: BlockRefusal | None = None
    vain_displacement: BlockRefusal | None = None
