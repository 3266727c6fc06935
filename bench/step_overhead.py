"""Milliseconds of a decode step that are not spent in the native kernels: scheduler, inputs, sampling, outputs.

    python bench/step_overhead.py

Times every call into the compiled library; the rest of the steps of `LLM.generate` is Python. Steady decodes,
greedy or with sampling (temperature, top_p), on the embedded model; medians over the steps.
"""

import argparse
import statistics
import time

from treadle import LLM, SamplingParams
from treadle.backends.cpu.build import best_build
from treadle.backends.cpu.library import load_library


class Timed:
    """A function that accumulates its own run time."""

    def __init__(self, function):
        self._function = function
        self.seconds = 0.0

    def __call__(self, *args):
        start = time.perf_counter()
        result = self._function(*args)
        self.seconds += time.perf_counter() - start
        return result


NATIVE = ("treadle_forward", "treadle_logits", "treadle_draw", "treadle_report", "treadle_penalize")
SAMPLING = NATIVE[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    build = best_build()
    if build is None:
        raise SystemExit("this processor cannot run the native kernels: they need AVX2 or 64-bit ARM")
    llm = LLM(
        quantization="int8", cpu_kernels=build, kv_cache_memory="1G", log_stats_interval_s=0,
        max_num_batched_tokens=512,
    )  # fmt: skip
    dll = load_library(build).dll  # the one that the engine calls
    timed = {name: Timed(getattr(dll, name)) for name in NATIVE}
    for name, function in timed.items():
        setattr(dll, name, function)

    def seconds(names) -> float:
        return sum(timed[name].seconds for name in names)

    step, steps = llm.engine.step, []

    def timed_step():
        native, sampling, start = seconds(NATIVE), seconds(SAMPLING), time.perf_counter()
        outputs = step()
        steps.append((time.perf_counter() - start, seconds(NATIVE) - native, seconds(SAMPLING) - sampling))
        return outputs

    llm.engine.step = timed_step
    kinds = {
        "greedy": {"temperature": 0.0},
        "temperature, top_p": {"temperature": 0.8, "top_p": 0.95},
        "… penalties, 5 logprobs": {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1, "logprobs": 5},
    }
    print(
        f"{'sequences':>9}  {'sampling':<26} {'step ms':>8} {'native ms':>9} {'Python ms':>9} {'sampling share':>14}"
    )
    for count in args.sequences:
        for title, options in kinds.items():
            params = SamplingParams(max_tokens=args.steps + 8, ignore_eos=True, detokenize=False, **options)
            steps.clear()
            prompts = [{"prompt_token_ids": [100 + i, 7, 8]} for i in range(count)]
            llm.generate(prompts, params, use_tqdm=False)
            steady = steps[-args.steps : -2]
            total = statistics.median(step for step, _, _ in steady)
            native = statistics.median(inside for _, inside, _ in steady)
            python = statistics.median(step - inside for step, inside, _ in steady)
            share = statistics.median(drawn / step for step, _, drawn in steady)
            figures = f"{total * 1e3:>8.2f} {native * 1e3:>9.2f} {python * 1e3:>9.2f} {share:>8.1%}"
            print(f"{count:>9}  {title:<26} {figures}", flush=True)


if __name__ == "__main__":
    main()
