"""Treadle against transformers' own `generate`: the same model, prompts and machine, in one run, in turns.

    python bench/vs_transformers.py                      batch 8 and 32, prompt 128, 64 new tokens, bfloat16
    python bench/vs_transformers.py --batch 1 --repeat 5

Greedy, end-of-sequence ignored. Each engine is warmed up first; then they take turns, so that a machine that
changes its speed changes it for both. Figures are medians; the ratio is taken pair by pair.
"""

import argparse
import statistics
import time

import torch
import transformers

from treadle import LLM, SamplingParams
from treadle.engine_config import DEFAULT_MODEL
from treadle.models.registry import find_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()

    path = find_model(DEFAULT_MODEL)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    peer = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=getattr(torch, args.dtype)
    ).eval()
    # Prefix caching off: every repetition computes everything.
    llm = LLM(dtype=args.dtype, enable_prefix_caching=False, log_stats_interval_s=0)
    params = SamplingParams(temperature=0.0, max_tokens=args.new_tokens, ignore_eos=True)

    def run_treadle(prompts: list[list[int]]) -> float:
        start = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        elapsed = time.perf_counter() - start
        assert all(len(o.outputs[0].token_ids) == args.new_tokens for o in outputs)
        return elapsed

    def run_transformers(prompts: list[list[int]]) -> float:
        ids = torch.tensor(prompts)
        start = time.perf_counter()
        with torch.inference_mode():
            out = peer.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=args.new_tokens,
                max_new_tokens=args.new_tokens,
                pad_token_id=0,
            )
        elapsed = time.perf_counter() - start
        assert out.shape[1] == args.prompt_len + args.new_tokens
        return elapsed

    print(
        f"{args.dtype}, prompt {args.prompt_len}, {args.new_tokens} new tokens, "
        f"{torch.get_num_threads()} threads; output tokens/s of the whole run, median of {args.repeat}"
    )
    print(f"{'batch':>5} {'Treadle':>9} {'transformers':>13} {'ratio (min – max)':>22}")
    for batch in args.batch:
        generator = torch.Generator().manual_seed(batch)
        prompts = torch.randint(100, 40000, (batch, args.prompt_len), generator=generator).tolist()
        run_treadle(prompts), run_transformers(prompts)
        pairs = [(run_treadle(prompts), run_transformers(prompts)) for _ in range(args.repeat)]
        num_tokens = batch * args.new_tokens
        ours = statistics.median(num_tokens / a for a, _ in pairs)
        theirs = statistics.median(num_tokens / b for _, b in pairs)
        ratios = sorted(b / a for a, b in pairs)
        print(
            f"{batch:>5} {ours:>9.1f} {theirs:>13.1f} "
            f"{statistics.median(ratios):>8.2f} ({ratios[0]:.2f} – {ratios[-1]:.2f})"
        )


if __name__ == "__main__":
    main()
