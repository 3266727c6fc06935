"""Accuracy of bfloat16 and int8 against float32: negative log-likelihood, KL divergence, top-1 agreement.

    python bench/accuracy.py

The text is prose from this project's docs, which no model has seen. The reference is float32 in plain torch; the
others run on the native kernels. Then prints greedy continuations side by side.
"""

import argparse
from pathlib import Path

import torch

from treadle import LLM, SamplingParams

DOCS = Path(__file__).parent.parent / "docs"
PROMPTS = (
    "The three laws of motion say that",
    "def quicksort(items):\n",
    "The main cause of the tides is",
)
KINDS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "as stored": {},
    "as stored, int8 KV": {"kv_cache_dtype": "int8"},
    "int4": {"quantization": "int4"},
    "int8": {"quantization": "int8"},
    "int8, bfloat16 KV": {"quantization": "int8", "kv_cache_dtype": "bfloat16"},
    "bfloat16, int8 KV": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
}


def logprobs_of(llm: LLM, token_ids: list[int]) -> torch.Tensor:
    """Log-probabilities after every token but the last: [n - 1, V]."""
    seen = []
    sampler = llm.engine.runner.backend.sampling_kernels
    report = sampler.report

    def spy(values, place, *rest):
        seen.append(values[torch.from_numpy(place)].double().log_softmax(-1))
        return report(values, place, *rest)

    sampler.report = spy
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    llm.generate([{"prompt_token_ids": token_ids}], params, use_tqdm=False)
    return torch.cat(seen)[: len(token_ids) - 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1000)
    args = parser.parse_args()
    text = "\n\n".join(path.read_text() for path in sorted((DOCS / "decisions").glob("00[1-6]*.md")))
    reference, continuations = None, {}
    print(f"{'number format':<20} {'NLL':>8} {'KL':>8} {'KL, worst':>9} {'top-1 agreement':>15}")
    for kind, options in KINDS.items():
        llm = LLM(log_stats_interval_s=0, kv_cache_memory="256M", max_model_len=2048, **options)
        token_ids = llm.get_tokenizer().encode(text)[: args.tokens]
        logprobs = logprobs_of(llm, token_ids)
        reference = logprobs if reference is None else reference
        nll = -logprobs[torch.arange(len(logprobs)), torch.tensor(token_ids[1:])].mean()
        kl = (reference.exp() * (reference - logprobs)).sum(-1)
        agreement = (reference.argmax(-1) == logprobs.argmax(-1)).double().mean()
        print(f"{kind:<20} {nll:>8.4f} {kl.mean():>8.5f} {kl.max():>9.5f} {agreement:>15.1%}", flush=True)
        outputs = llm.generate(list(PROMPTS), SamplingParams(max_tokens=40, temperature=0.0), use_tqdm=False)
        continuations[kind] = [output.outputs[0].text for output in outputs]
    for i, prompt in enumerate(PROMPTS):
        print(f"\n{prompt!r}")
        for kind, texts in continuations.items():
            print(f"  {kind:<20} {texts[i]!r}")


if __name__ == "__main__":
    main()
