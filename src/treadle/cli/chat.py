"""`treadle chat`: a conversation at the terminal."""

import argparse
import sys
from typing import TYPE_CHECKING

from treadle.cli.console import load, say
from treadle.cli.options import add_engine_options, add_sampling_options, as_text
from treadle.core.errors import InvalidRequestError, UsageError

if TYPE_CHECKING:
    from treadle import LLM, SamplingParams

HELP = "/new starts a new conversation, /exit (or Ctrl-D) quits; Ctrl-C stops an answer"


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "chat",
        help="talk to a chat model",
        description="Talk to a chat model. The conversation so far stays in the KV cache, so each turn computes "
        f"only the new tokens. {HELP}.",
    )
    parser.add_argument("--system", help="system message")
    add_sampling_options(parser, max_tokens=512)
    add_engine_options(parser, without=("seed",))  # --seed sets the seed of requests
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    start = [{"role": "system", "content": as_text("--system", args.system)}] if args.system else []
    llm, params = load(args, log_stats=False)
    messages = list(start)
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401 - line editing and history for input()

        say(f"{HELP}.")
    while True:
        try:
            line = input("\n> " if interactive else "").strip()
        except EOFError:
            return 0
        if line in ("/exit", "/quit"):
            return 0
        if line == "/new":
            messages = list(start)
            say("(new conversation)")
        elif line.startswith("/"):
            say(f"unknown command {line.split()[0]}; {HELP}")
        elif line:
            try:
                line = as_text("message", line)
            except UsageError as error:
                say(f"treadle: {error}")
                continue
            messages.append({"role": "user", "content": line})
            try:
                messages.append({"role": "assistant", "content": answer(llm, params, messages)})
            except InvalidRequestError as error:
                messages.pop()
                say(f"treadle: {error}\n(/new starts a new conversation)")


def answer(llm: "LLM", params: "SamplingParams", messages: list[dict[str, str]]) -> str:
    """Stream the answer to a conversation to standard output and return it; Ctrl-C ends it early."""
    pieces = []
    outputs = llm.stream(llm.render_chat(messages), params, add_special_tokens=False)
    try:
        for output in outputs:
            pieces.append(output.outputs[0].text)
            print(output.outputs[0].text, end="", flush=True)
            if output.finished:
                print()
                metrics = output.metrics
                if output.error is not None:
                    say(f"treadle: {output.error}")
                elif metrics.time_to_first_token is not None:
                    say(
                        f"(first token after {metrics.time_to_first_token * 1000:.0f} ms, "
                        f"{metrics.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens cached)"
                    )
    except KeyboardInterrupt:
        print()
        say("(stopped)")
    return "".join(pieces)
