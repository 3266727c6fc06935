"""Applies recorded block changes, and computes the same map from all block tables for comparison."""


def spread(pairs):
    return [
        block for first, count in zip(pairs[::2], pairs[1::2], strict=True) for block in range(first, first + count)
    ]


def apply(blocks, changes):
    for name in ("free", "cached"):
        for block in spread(changes.get(name, [])):
            blocks[block] = name
    for name in ("held", "shared"):
        for request_id, pairs in changes.get(name, {}).items():
            for block in spread(pairs):
                blocks[block] = (name, request_id)


def plain_look(scheduler):
    kv = scheduler.kv
    blocks = {}
    for block in range(kv.pool.num_blocks):
        blocks[block] = "cached" if kv.pool.is_cached_idle(block) else "free"
    holders = {}
    for seq in scheduler.batch.running_sequences():
        for block in kv.block_table(seq):
            holders.setdefault(block, []).append(seq.request.request_id)
    for block, names in holders.items():
        blocks[block] = ("shared" if len(names) > 1 else "held", names[0])
    return blocks
