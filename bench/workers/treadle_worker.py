"""Treadle. Arguments: model, then options of LLM as name=value."""

from protocol import serve  # isort: skip (first: it keeps the output of engines out of the answers)

import sys

import treadle
from treadle import LLM, SamplingParams

options = dict(argument.split("=") for argument in sys.argv[2:])
llm = LLM(sys.argv[1], log_stats_interval_s=0, **options)


def generate(requests):
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for _, count in requests]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids, _ in requests], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


serve(f"Treadle {treadle.__version__}", generate)
