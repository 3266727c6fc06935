"""Tokens/s of one sequence and of eight, quiet and beside busy loops that take the processors.

    python bench/neighbours.py                              the embedded model, 0, 1 and 2 busy loops
    python bench/neighbours.py --engines treadle-int8 llama.cpp --loops 0 1 2 4 --rounds 5

Runs with and without neighbours take turns, and so do the engines. With one busy loop per core a fair share is half
of the quiet rate. Figures are medians over the rounds.
"""

import argparse
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from compare import ENGINES, PEERS, Engine, Prompts

PROMPT, NEW = 16, 96


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def decode_rate(engine: Engine, count: int, prompts: Prompts) -> float:
    """Decoded tokens/s of `count` sequences."""
    first = engine.run([[prompts.ids(PROMPT), 1] for _ in range(count)])
    whole = engine.run([[prompts.ids(PROMPT), NEW] for _ in range(count)])
    return count * (NEW - 1) / max(1e-9, whole["seconds"] - first["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["treadle", "llama.cpp"], choices=list(ENGINES))
    parser.add_argument("--loops", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--sequences", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    engines = {}
    for name in args.engines:
        try:
            engines[name] = Engine(name, PEERS)
        except (FileNotFoundError, RuntimeError) as error:
            print(f"{name}: not available ({error})", flush=True)
    prompts = Prompts(0)
    rates: dict[tuple[str, int, int], list[float]] = {}
    try:
        for engine in engines.values():
            decode_rate(engine, max(args.sequences), prompts)  # warm-up
        for _ in range(args.rounds):
            for loops in args.loops:
                for name, engine in engines.items():
                    for count in args.sequences:
                        with busy_loops(loops):
                            rate = decode_rate(engine, count, prompts)
                        rates.setdefault((name, count, loops), []).append(rate)
    finally:
        for engine in engines.values():
            engine.close()
    print("| engine, sequences | " + " | ".join(f"{loops} busy loops" for loops in args.loops) + " |")
    print("|---" * (len(args.loops) + 1) + "|")
    for name in engines:
        for count in args.sequences:
            medians = [statistics.median(rates[name, count, loops]) for loops in args.loops]
            cells = [f"{rate:,.0f} ({rate / medians[0]:.2f})" for rate in medians]
            print(f"| {name}, {count} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
