"""What the scheduler is at a moment: queues, rows, blocks. Plain data; lifecycle.py changes it."""

from dataclasses import dataclass, field

from treadle.core.clock import Clock
from treadle.core.config import SchedulerConfig
from treadle.core.request import Request
from treadle.kvcache import KVCacheManager
from treadle.scheduler.batch import RunningBatch
from treadle.scheduler.beams import BeamSearch
from treadle.scheduler.policies.at_work import PoliciesAtWork
from treadle.scheduler.queue import RankedQueue


@dataclass(frozen=True, slots=True)
class BlockRefusal:
    """The state in which a request found too few blocks. Until it changes for the better, so it stays."""

    request: Request
    num_available_blocks: int
    num_running: int
    cache_version: int


@dataclass(slots=True)
class SchedulerState:
    """Queues, rows and blocks.

    Attributes:
        config, clock, kv, batch, policies: what the phases work with.
        waiting, swapped: queues in rank order; the running queue is the batch.
        requests: every unfinished request by name.
        finished: requests that have ended and not been handed out yet, by name. Their names are still in use.
        beams: the searches of running, waiting or swapped requests that use beams.
        adapters: LoRA adapter → running requests that use it.
        num_cached_tokens: prompt tokens that the cache held, of requests admitted in the step that is planned.
        step: number of the step that is planned.
        block_refusal: why the first waiting request was refused last.
        vain_displacement: the state in which all running requests of worse priority together would not have made
            room for it.
    """

    config: SchedulerConfig
    clock: Clock
    kv: KVCacheManager
    batch: RunningBatch
    policies: PoliciesAtWork
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
