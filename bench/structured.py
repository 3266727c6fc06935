"""Cost of structured outputs: the same requests with and without a constraint, in turns.

    python bench/structured.py

The constraints: a regular expression over all printable characters, and a JSON schema of a list of objects. Answers
are sampled and of equal length. Reports output tokens/s and their ratios.
"""

import argparse
import statistics
import time

from treadle import LLM, SamplingParams
from treadle.loadgen.workload import random_jobs

ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "size": {"type": "integer"}, "colour": {"enum": ["red", "green"]}},
    "required": ["name", "size", "colour"],
    "additionalProperties": False,
}
FORMS = {
    "none": None,
    "regex": {"regex": "[ -~\\n]{2000,}"},
    "json": {"json": {"type": "array", "items": ITEM, "minItems": 200}, "disable_any_whitespace": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    llm = LLM(quantization="int8", kv_cache_memory="1G", log_stats_interval_s=0)
    for count in args.sequences:
        seconds: dict[str, list[float]] = {name: [] for name in FORMS}
        for i in range(args.rounds + 1):
            for name, form in FORMS.items():
                params = SamplingParams(
                    temperature=1.0, seed=i, max_tokens=args.new_tokens, ignore_eos=form is None,
                    structured_outputs=form,
                )  # fmt: skip
                jobs = random_jobs(count, 32, args.new_tokens, vocab_size=40_000, seed=i)
                start = time.perf_counter()
                outputs = llm.generate([{"prompt_token_ids": job.prompt} for job in jobs], params, use_tqdm=False)
                if i:  # the first round warms up
                    seconds[name].append(time.perf_counter() - start)
                assert all(len(output.outputs[0].token_ids) == args.new_tokens for output in outputs)
        free = seconds["none"]
        for name, times in seconds.items():
            ratios = [a / b for a, b in zip(free, times, strict=True)]
            tokens = count * args.new_tokens / statistics.median(times)
            print(f"{count:4} sequences  {name:6} {tokens:7.0f} tokens/s   {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
