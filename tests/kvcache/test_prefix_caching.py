"""Which blocks the prefix cache finds, and which it must not find."""

from treadle.kvcache import PrefixIndex
from treadle.kvcache.prefix_index import ROOT, BlockKey
from treadle.testing.toy import ToyEngine, toy_continuation


def hits(engine, name):
    return engine.finished[name].metrics.num_cached_tokens


def test_a_full_hit_still_computes_the_last_token():
    engine = ToyEngine(num_blocks=32, block_size=4)
    prompt = list(range(16))
    engine.add("first", prompt, max_tokens=1)
    engine.run()
    engine.add("second", prompt, max_tokens=5)
    report = engine.step()
    # 16 tokens are 4 full blocks; the last token needs its logits, so the last block is computed again.
    assert [(s.start, s.count) for s in engine.prefills(report)] == [(12, 4)]
    assert engine.run()["second"] == toy_continuation(prompt, 5)
    assert hits(engine, "second") == 12


def test_a_prompt_longer_by_one_token_hits_all_full_blocks():
    engine = ToyEngine(num_blocks=32, block_size=4)
    engine.add("first", list(range(16)), max_tokens=1)
    engine.run()
    engine.add("second", [*range(16), 7], max_tokens=1)
    assert [(s.start, s.count) for s in engine.prefills(engine.step())] == [(16, 1)]


def test_generated_blocks_are_found_by_the_next_turn():
    engine = ToyEngine(num_blocks=32, block_size=4)
    prompt = list(range(6))
    engine.add("first", prompt, max_tokens=10)
    answer = engine.run()["first"]
    engine.add("second", prompt + answer + [1, 2, 3], max_tokens=1)
    engine.run()
    # The last token of the answer was never computed: 15 tokens, 3 full blocks.
    assert hits(engine, "second") == 12


def test_a_block_is_not_found_before_its_kv_is_written():
    engine = ToyEngine(num_blocks=32, block_size=4, max_num_batched_tokens=64)
    prompt = list(range(17))
    engine.add("a", prompt, max_tokens=3)
    engine.add("b", prompt, max_tokens=3)
    report = engine.step()
    assert [(s.start, s.count) for s in engine.prefills(report)] == [(0, 17), (0, 17)]
    tokens = engine.run()
    assert tokens["a"] == tokens["b"] == toy_continuation(prompt, 3)


def test_requests_with_different_salts_share_no_blocks():
    engine = ToyEngine(num_blocks=64, block_size=4)
    prompt = list(range(17))
    for name, salt in [("a", None), ("b", "x"), ("c", "y"), ("d", "x")]:
        engine.add(name, prompt, max_tokens=1, cache_salt=salt)
        engine.run()
    assert [hits(engine, name) for name in "abcd"] == [0, 0, 0, 16]


def test_tails_are_evicted_before_beginnings():
    engine = ToyEngine(num_blocks=8, block_size=4, max_model_len=32)
    prompt = list(range(25))
    engine.add("first", prompt, max_tokens=1)
    engine.run()
    # Of the five blocks, one is free, one was never full, and three evict the tail of `first`.
    engine.add("other", [49] * 19, max_tokens=1)
    engine.run()
    engine.add("again", prompt, max_tokens=1)
    engine.run()
    assert hits(engine, "again") == 12


def test_the_index_never_outgrows_the_pool():
    engine = ToyEngine(num_blocks=10, block_size=2, max_model_len=20, max_num_seqs=2)
    index = engine.scheduler.kv.index
    for i in range(500):
        engine.add(f"r{i}", [i % 50, i // 50, 3, 4, 5, 6, 7, 8, 9], max_tokens=2)
        engine.run()
        engine.finished.clear()
        assert len(index) <= 10
    assert index.version > 1_250  # far more blocks were indexed than the pool holds


def test_disabled_prefix_caching_finds_no_blocks():
    engine = ToyEngine(num_blocks=32, block_size=4, enable_prefix_caching=False)
    for name in ("a", "b"):
        engine.add(name, list(range(16)), max_tokens=1)
        engine.run()
    assert hits(engine, "b") == 0
    assert engine.scheduler.kv.index is None


class CollidingKey(BlockKey):
    """A key with the same hash as every other key."""

    __slots__ = ()

    def __hash__(self):
        return 1


def test_colliding_hashes_do_not_change_hits():
    index = PrefixIndex()
    keys = [CollidingKey(ROOT, bytes([i]), None) for i in range(50)]
    for i, key in enumerate(keys):
        index.add(key, i)
    assert [index.find(key).block for key in keys] == list(range(50))
    assert index.find(CollidingKey(ROOT, b"other", None)) is None


def test_colliding_hashes_do_not_change_the_tokens_of_a_run(monkeypatch):
    monkeypatch.setattr("treadle.kvcache.manager.BlockKey", CollidingKey)
    engine = ToyEngine(num_blocks=24, block_size=2, max_model_len=48)
    prompts = {f"r{i}": [i % 3] * (5 + i) for i in range(16)}
    for name, prompt in prompts.items():
        engine.add(name, prompt, 10)
    tokens = engine.run()
    assert tokens == {name: toy_continuation(prompt, 10) for name, prompt in prompts.items()}
    assert sum(hits(engine, name) for name in prompts) > 0


def test_a_child_is_not_reached_through_a_later_parent():
    index = PrefixIndex()
    parent = index.add(BlockKey(ROOT, b"a", None), 1)
    child = BlockKey(parent.entry_id, b"b", None)
    index.add(child, 2)
    index.remove(1)
    again = index.add(BlockKey(ROOT, b"a", None), 3)
    assert again.entry_id != parent.entry_id
    assert index.find(BlockKey(again.entry_id, b"b", None)) is None
    index.remove(2)
    assert len(index) == 1


def test_the_index_keeps_the_first_of_equal_blocks():
    index = PrefixIndex()
    key = BlockKey(ROOT, b"a", None)
    assert index.add(key, 1).block == 1
    assert index.add(key, 2).block == 1
    assert not index.holds(2)


def test_a_block_whose_parent_was_evicted_is_found_again_under_its_new_parent():
    index = PrefixIndex()
    old_parent = index.add(BlockKey(ROOT, b"a", None), 1)
    index.add(BlockKey(old_parent.entry_id, b"b", None), 2)
    index.remove(1)
    new_parent = index.add(BlockKey(ROOT, b"a", None), 3)
    index.add(BlockKey(new_parent.entry_id, b"b", None), 2)
    assert index.find(BlockKey(new_parent.entry_id, b"b", None)).block == 2
    assert index.find(BlockKey(old_parent.entry_id, b"b", None)) is None
    assert len(index) == 2
