"""`treadle generate`: complete prompts, or answer them as chat messages."""

import argparse
import sys
from pathlib import Path

from treadle.cli.console import RunStats, load, say
from treadle.cli.options import add_engine_options, add_sampling_options, as_text
from treadle.core.errors import UsageError
from treadle.trace.step_table import StepTableObserver

EXAMPLES = """examples:
  treadle generate "The three primary colours are" --max-tokens 30
  treadle generate --chat "Why is the sky blue?"
  treadle generate --file prompts.txt              one prompt per line
  echo "Hello" | treadle generate -
  treadle generate --steps --max-num-batched-tokens 32 --max-num-seqs 3 "One" "Two" "Three"
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "generate",
        help="complete prompts, or answer them (--chat)",
        description="Complete prompts. The output of a single prompt is streamed; several prompts run as one batch.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="prompt text; - reads a prompt from standard input"
    )
    parser.add_argument("--file", type=Path, help="read one prompt per line from this file")
    parser.add_argument("--chat", action="store_true", help="send each prompt as a message to a chat model")
    parser.add_argument("--system", help="system message, with --chat")
    parser.add_argument("--steps", action="store_true", help="show what each request did in each step")
    add_sampling_options(parser, max_tokens=128)
    add_engine_options(parser, without=("seed",))  # --seed sets the seed of requests
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    prompts = _read_prompts(args)
    system = [{"role": "system", "content": as_text("--system", args.system)}] if args.system else []
    llm, params = load(args, log_stats=len(prompts) > 1)
    stats, steps = (
        RunStats(llm.cache_config.num_blocks),
        StepTableObserver(llm.cache_config.num_blocks, llm.engine.clock),
    )
    llm.engine.add_observer(stats)
    if args.steps:
        llm.engine.add_observer(steps)
    conversations = [[*system, {"role": "user", "content": prompt}] for prompt in prompts]
    error = None
    if len(prompts) == 1:
        prompt = llm.render_chat(conversations[0]) if args.chat else prompts[0]
        for output in llm.stream(prompt, params, add_special_tokens=not args.chat):
            error = output.error
            print(output.outputs[0].text, end="", flush=True)
        print()
    else:
        if args.chat:
            outputs = llm.chat(conversations, params, use_tqdm=False)
        else:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        for output in outputs:
            error = error or output.error
            print(f"── {output.prompt!r}\n{output.outputs[0].text.strip()}\n")
    if args.steps:
        say("\n" + steps.table.render())
    say("\n" + stats.summary())
    if error is not None:
        say(f"treadle: {error}")
    return 1 if error is not None else 0


def _read_prompts(args: argparse.Namespace) -> list[str]:
    prompts = [as_text("PROMPT", sys.stdin.read() if prompt == "-" else prompt) for prompt in args.prompts]
    if args.file is not None:
        try:
            lines = args.file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError("--file", f"{args.file} cannot be read ({error})") from error
        prompts += [line for line in lines if line.strip()]
    if not prompts:
        raise UsageError("PROMPT", "give at least one prompt, or - to read one from standard input")
    return prompts
