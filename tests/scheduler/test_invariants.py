"""The invariant checker detects each kind of violation."""

import pytest

from treadle.core.request import RequestStatus
from treadle.scheduler import check_invariants
from treadle.scheduler.invariants import InvariantViolation
from treadle.testing.toy import ToyEngine


@pytest.fixture
def engine():
    engine = ToyEngine(num_blocks=16, block_size=4, max_num_seqs=2, max_model_len=64)
    for name in ("a", "b", "c"):
        engine.add(name, [ord(name) % 50] * 9, max_tokens=20)
    for _ in range(3):
        engine.step()
    return engine


def block_of(engine):
    return int(engine.scheduler.kv.block_tables[0, 0])


VIOLATIONS = {
    "counts 2 references": lambda e: e.scheduler.kv.pool.ref_counts.__setitem__(block_of(e), 2),
    "counts 1 references, tables have": lambda e: (
        e.scheduler.kv.block_tables.__setitem__((0, 0), e.scheduler.kv.pool.free_block_ids()[-1])
        or e.scheduler.kv.pool.ref_counts.__setitem__(block_of(e), 1)
    ),
    "is on the free stack twice": lambda e: e.scheduler.kv.pool._free.__setitem__(0, e.scheduler.kv.pool._free[1]),
    "free + cached-idle": lambda e: setattr(e.scheduler.kv.pool, "_num_free", e.scheduler.kv.pool._num_free - 1),
    "more computed than known": lambda e: e.scheduler.batch.num_computed_tokens.__setitem__(0, 60),
    "not in exactly one queue": lambda e: e.scheduler.waiting._requests.clear(),
    "has another status": lambda e: setattr(e.scheduler.waiting.first(), "status", RequestStatus.FINISHED),
    "seats were lost": lambda e: e.scheduler.batch._free_rows.append(1),
    "can be found": lambda e: e.scheduler.kv.index._entry_of_block.clear(),
}


@pytest.mark.parametrize("message", VIOLATIONS)
def test_each_violation_is_detected(message, engine):
    check_invariants(engine.scheduler)
    if message == "can be found":
        engine.scheduler.abort("a")  # leaves cached-idle blocks
        check_invariants(engine.scheduler)
        message_ = "cached-idle block cannot be found|entries without a block"
    else:
        message_ = message.replace("+", r"\+")
    VIOLATIONS[message](engine)
    with pytest.raises(InvariantViolation, match=message_):
        check_invariants(engine.scheduler)
