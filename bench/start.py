"""Seconds from the start of a process to a ready engine, and its memory.

    python bench/start.py --quantization int8 --kv-cache-memory 256M

Each measurement is a new process: Python, the import of torch, weights, kernels (compiled before), a first answer.
"Resident" is the memory of the process after 8 answers, "peak" its maximum; only touched pages of the KV pool count,
so the pool is filled first.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

CODE = """
import json, os, resource, sys, time
from treadle import LLM, SamplingParams
options = json.loads(sys.argv[1])
llm = LLM(log_stats_interval_s=0, **options)
ready = time.time()
llm.generate("Hello", SamplingParams(max_tokens=1, temperature=0.0), use_tqdm=False)
first = time.time()
params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
slots = llm.cache_config.num_slots
for i in range(0, slots, 1024):
    prompt = [100 + (i * 7 + j * 13) % 40000 for j in range(1000)]
    llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
pages = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"ready": ready, "first": first, "resident": pages, "peak": peak}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quantization", choices=["int8"])
    parser.add_argument("--kv-cache-memory", default="256M")
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    options = {"quantization": args.quantization, "kv_cache_memory": args.kv_cache_memory, "swap_space": 0}
    runs = []
    for _ in range(args.repeat):
        start = time.time()
        out = subprocess.run(
            [sys.executable, "-c", CODE, json.dumps(options)], check=True, stdout=subprocess.PIPE, text=True
        )
        figures = json.loads(out.stdout)
        runs.append((figures["ready"] - start, figures["first"] - start, figures["resident"], figures["peak"]))
    names = ("ready, s", "first token, s", "resident, MiB", "peak, MiB")
    for name, values in zip(names, zip(*runs, strict=True), strict=True):
        unit = 2**20 if "MiB" in name else 1
        shown = sorted(value / unit for value in values)
        print(f"{name:<16} {statistics.median(shown):8.2f}  ({shown[0]:.2f} – {shown[-1]:.2f})")


if __name__ == "__main__":
    main()
