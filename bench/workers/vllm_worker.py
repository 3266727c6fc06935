"""vLLM's CPU build. Argument: a folder with the model as bfloat16 safetensors (export_safetensors.py)."""

from protocol import serve  # isort: skip (first: it keeps the output of engines out of the answers)

import os
import sys

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import vllm


def main():
    llm = vllm.LLM(sys.argv[1], dtype="bfloat16", max_model_len=2048, disable_log_stats=True)

    def generate(requests):
        params = [vllm.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for _, count in requests]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids, _ in requests], params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    serve(f"vLLM {vllm.__version__}", generate)


if __name__ == "__main__":
    main()
