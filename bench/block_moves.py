"""Bandwidth of KV block moves between the two tiers, by memory layout and method of copying.

    python bench/block_moves.py

Moves 128 blocks of the embedded model (30 layers of 12 KiB each) from scattered places of one pool to the other, in
turns: with all layers of a block side by side, as in the native backend, or with one pool per layer; block by block,
or gathered first. Figures are medians.
"""

import argparse
import random
import statistics
import time

import torch

from treadle.backends.block_tiers import copy_blocks

LAYERS, LAYER_BYTES = 30, 12288


def gathered(source: torch.Tensor, target: torch.Tensor, pairs: list[tuple[int, int]], *, block_dim: int) -> None:
    blocks = torch.tensor(pairs)
    target.index_copy_(block_dim, blocks[:, 1], source.index_select(block_dim, blocks[:, 0]))


WAYS = {"one by one": copy_blocks, "gathered": gathered}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pool", type=int, default=2000, help="number of blocks in a pool")
    parser.add_argument("--count", type=int, default=128, help="number of blocks to move")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    pairs = [(block, i) for i, block in enumerate(random.Random(0).sample(range(args.pool), args.count))]
    pools = {
        "blocks of all layers": (0, (args.pool, LAYERS * LAYER_BYTES)),
        "a pool for each layer": (1, (LAYERS, args.pool, LAYER_BYTES)),
    }
    times: dict[tuple[str, str], list[float]] = {}
    tensors = {
        name: (dim, *(torch.full(shape, i, dtype=torch.uint8) for i in (1, 2)))
        for name, (dim, shape) in pools.items()
    }
    for _ in range(args.rounds):
        for name, (dim, source, target) in tensors.items():
            for how, copy in WAYS.items():
                start = time.perf_counter()
                copy(source, target, pairs, block_dim=dim)
                times.setdefault((name, how), []).append(time.perf_counter() - start)
    num_bytes = args.count * LAYERS * LAYER_BYTES
    for (name, how), values in times.items():
        took = statistics.median(values)
        print(f"{name:22s} {how:11s} {took * 1e3:6.1f} ms  {num_bytes / took / 1e9:5.1f} GB/s")


if __name__ == "__main__":
    main()
