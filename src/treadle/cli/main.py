"""The `treadle` command: parses options, runs a subcommand, prints errors as one line."""

import argparse
import os
import sys
from collections.abc import Sequence

from treadle import __version__
from treadle.cli import EXIT_INTERRUPTED, bench, chat, explain, generate, models, serve
from treadle.cli.console import use_any_text
from treadle.core.errors import TreadleError
from treadle.core.logs import show_logs

EXIT_USAGE = 2


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line, with all commands."""
    parser = argparse.ArgumentParser(
        prog="treadle",
        description="An LLM inference engine built around its request scheduler.",
        epilog="Run `treadle COMMAND --help` for the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"treadle {__version__}")
    parser.add_argument("-q", "--quiet", action="store_true", help="log errors only")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (generate, chat, serve, bench, models, explain):
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    use_any_text()
    args = make_parser().parse_args(argv)
    try:
        show_logs("ERROR" if args.quiet else None)
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except TreadleError as error:
        print(f"treadle: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("\ntreadle: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of the pipe has exited (`treadle … | head`).
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
