"""Command-line options that several commands share. They are those of EngineConfig and SamplingParams.

No torch is imported before a model is needed, so that `--help` and mistakes answer at once.
"""

import argparse
from pathlib import Path
from typing import Any

from treadle.engine_config import DEFAULT_MODEL
from treadle.errors import InvalidRequestError


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that shape the engine."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help="the embedded model (%(default)s), a folder in Hugging Face layout, a .gguf file, or a hub id",
    )
    group.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16 (default: %(default)s)")
    group.add_argument(
        "--quantization", choices=["int8"], help="int8: about twice as fast on a CPU, slightly less exact"
    )
    group.add_argument(
        "--kv-cache-dtype",
        default="auto",
        help="auto (int8 with --quantization int8, else the model's), bfloat16 or int8 (default: %(default)s)",
    )
    group.add_argument(
        "--cpu-kernels",
        default="auto",
        help="native CPU kernels: auto (the best that run here), avx512_bf16, avx512_vnni, avx512, avx2, or off for "
        "plain torch (default: %(default)s)",
    )
    group.add_argument("--num-threads", type=int, help="threads that compute on a CPU (default: all cores)")
    group.add_argument("--device", default="auto", help="auto, cpu or cuda (default: %(default)s)")
    group.add_argument(
        "--max-model-len", type=int, help="most tokens of prompt and output (default: the model's limit)"
    )
    group.add_argument(
        "--max-num-seqs", type=int, help="most sequences at once (default: 256, or the tokens of a step if fewer)"
    )
    group.add_argument("--max-num-batched-tokens", type=int, help="most tokens of one step (default: 512)")
    group.add_argument("--block-size", type=int, default=16, help="tokens of a KV block (default: %(default)s)")
    group.add_argument("--num-kv-blocks", type=int, help="blocks of the KV pool (default: from free memory)")
    group.add_argument("--kv-cache-memory", help="size of the KV pool instead, e.g. 512M or 2G")
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="share the KV of equal beginnings (default: on)",
    )
    group.add_argument(
        "--scheduler",
        default="chunked",
        help="phase policy: chunked (decodes first, prompts in what is left), three-phase (the same with "
        "whole prompts), prefill-first (whole prompts, else decodes) or phased (a step is all prompts or all "
        "decodes) (default: %(default)s)",
    )
    group.add_argument(
        "--order",
        default="fcfs",
        help="who goes first: fcfs, priority, shortest-first, fair or deadline (default: %(default)s)",
    )
    group.add_argument(
        "--preemption-mode",
        default="auto",
        help="auto (one sequence is computed again, several are swapped), recompute or swap (default: %(default)s)",
    )
    group.add_argument(
        "--swap-space", type=float, default=1.0, help="GiB for swapped requests (default: %(default)s)"
    )
    group.add_argument(
        "--admission-headroom",
        type=int,
        default=1,
        help="free blocks per running sequence that an admission leaves (default: %(default)s)",
    )
    group.add_argument(
        "--long-prefill-token-threshold",
        type=int,
        metavar="TOKENS",
        help="a prompt with more tokens left leaves half of a step's prompt tokens to others; 0 for none "
        "(default: the tokens of a step)",
    )
    group.add_argument("--record", metavar="RUN.jsonl", help="record every step, for `treadle explain`")
    group.add_argument(
        "--check-invariants", action="store_true", help="check the scheduler's state in every step (slow)"
    )


def add_sampling_options(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """Add the options that choose tokens."""
    group = parser.add_argument_group("sampling (defaults: what the model asks for, else greedy)")
    group.add_argument(
        "--max-tokens", type=int, default=max_tokens, help="most tokens to generate (default: %(default)s)"
    )
    group.add_argument("--temperature", type=float, help="0 is greedy")
    group.add_argument("--top-p", type=float, help="keep the most likely tokens up to this probability")
    group.add_argument("--top-k", type=int, help="keep this many most likely tokens")
    group.add_argument("--min-p", type=float, help="drop tokens below this share of the most likely one")
    group.add_argument("--seed", type=int, help="makes sampling repeatable")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end at this text (may be repeated)")
    group.add_argument("--json-schema", metavar="FILE", help="answer in JSON that keeps to this schema")
    group.add_argument("--regex", help="answer in text that matches this regular expression")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the model's own end")


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of LLM."""
    names = (
        "model", "dtype", "quantization", "kv_cache_dtype", "cpu_kernels", "num_threads", "device", "max_model_len",
        "max_num_seqs", "max_num_batched_tokens", "block_size", "num_kv_blocks", "kv_cache_memory",
        "enable_prefix_caching", "scheduler", "order", "preemption_mode", "swap_space", "admission_headroom",
        "long_prefill_token_threshold", "check_invariants", "record",
    )  # fmt: skip
    return {name: getattr(args, name) for name in names}


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of SamplingParams that were given."""
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "ignore_eos")
    options = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    form = {"json": _read_schema(args.json_schema), "regex": args.regex}
    given = {name: value for name, value in form.items() if value is not None}
    return {**options, "structured_outputs": given} if given else options


def _read_schema(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError("--json-schema", f"{path} cannot be read ({error})") from error
