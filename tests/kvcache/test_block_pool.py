import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from support.examples import examples
from treadle.kvcache import BlockPool


def release(pool, blocks, cached=()):
    pool.release(np.array(blocks, dtype=np.int32), is_cached=set(cached).__contains__)


def test_free_blocks_are_allocated_before_the_least_recently_used_cached_ones():
    evicted = []
    pool = BlockPool(6, on_evict=evicted.append)
    blocks = pool.take(6).tolist()
    assert blocks == [0, 1, 2, 3, 4, 5]
    assert pool.num_available == 0
    release(pool, [3], cached=[3])
    release(pool, [1], cached=[1])
    release(pool, [5])
    assert pool.num_available == 3
    assert pool.num_cached_idle == 2
    assert pool.take(2).tolist() == [5, 3]
    assert evicted == [3]


def test_a_hit_saves_a_block_from_eviction():
    evicted = []
    pool = BlockPool(2, on_evict=evicted.append)
    pool.take(2)
    release(pool, [0, 1], cached=[0, 1])
    pool.reference([0])
    assert pool.num_available == 1
    assert pool.take(1).tolist() == [1]
    assert pool.ref_counts.tolist() == [1, 1]
    assert evicted == [1]


def test_a_shared_block_becomes_available_with_its_last_reference():
    pool = BlockPool(1, on_evict=lambda block: None)
    pool.take(1)
    pool.reference([0])
    release(pool, [0])
    assert pool.num_available == 0
    release(pool, [0])
    assert pool.num_available == 1


@examples(200)
@given(st.lists(st.tuples(st.sampled_from(["take", "release", "reference"]), st.integers(0, 7)), max_size=60))
def test_the_pool_equals_a_brute_force_model(actions):
    size = 8
    pool = BlockPool(size, on_evict=lambda block: cached.discard(block))
    cached = set()
    free, idle, counts = list(range(size)), [], [0] * size
    for action, number in actions:
        if action == "take":
            count = min(number, len(free) + len(idle))
            taken = pool.take(count).tolist()
            assert len(set(taken)) == count
            for block in taken:
                # Free blocks first, in any order; then idle blocks in order of eviction.
                if free:
                    free.remove(block)
                else:
                    assert idle.pop(0) == block
                counts[block] = 1
        elif action == "release" and counts[number]:
            if number % 2:
                cached.add(number)
            release(pool, [number], cached)
            counts[number] -= 1
            if not counts[number]:
                (idle if number in cached else free).append(number)
        elif action == "reference" and (counts[number] or number in idle):
            pool.reference([number])
            counts[number] += 1
            if number in idle:
                idle.remove(number)
        assert pool.ref_counts.tolist() == counts
        assert sorted(pool.free_block_ids()) == sorted(free)
        assert pool.num_available == len(free) + len(idle)
