"""A worker of compare.py: loads an engine, then times batches that arrive on standard input.

One JSON object per line. In: {"requests": [[prompt token ids, number of new tokens], …]}. Out: {"ready": …} once,
then {"seconds": …, "num_tokens": …, "peak_mib": …} per line. Sampling is greedy and end-of-sequence is
ignored. Depends on the standard library only, because it runs in every peer's environment.
"""

import json
import os
import resource
import sys
import time

# Keep the engine's own output out of the answers.
_answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def serve(name, generate):
    """Answer until standard input ends.

    Args:
        name: of the engine, with its version.
        generate: [(token ids, number of new tokens)] → list with each request's new token ids.
    """
    print(json.dumps({"ready": name}), file=_answers, flush=True)
    for line in sys.stdin:
        requests = [(list(ids), count) for ids, count in json.loads(line)["requests"]]
        start = time.perf_counter()
        outputs = generate(requests)
        seconds = time.perf_counter() - start
        for (_, count), output in zip(requests, outputs, strict=True):
            assert len(output) == count, f"{name}: {len(output)} tokens instead of {count}"
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        answer = {"seconds": seconds, "num_tokens": sum(map(len, outputs)), "peak_mib": peak}
        print(json.dumps(answer), file=_answers, flush=True)
