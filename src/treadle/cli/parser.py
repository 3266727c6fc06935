"""The parser of the command line, with all commands."""

import argparse

from treadle import __version__
from treadle.cli import bench, chat, explain, generate, models, serve


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
