"""The `treadle` command: parses options, runs a subcommand, prints errors as one line.

At the top it imports only what is there already: the imports take most of the first second, and Ctrl-C in them must
not print a traceback.
"""

import os
import signal
import sys

from treadle.cli import EXIT_INTERRUPTED

TYPE_CHECKING = False  # `typing` takes longer than all other imports here
if TYPE_CHECKING:
    from collections.abc import Sequence

EXIT_USAGE = 2


def main(argv: "Sequence[str] | None" = None) -> int:
    """Run the command line; return the exit status."""
    # Not KeyboardInterrupt: some imports swallow it, or report another error.
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        signal.signal(signal.SIGINT, _exit_at_once)
    try:
        from treadle.cli.console import use_any_text
        from treadle.cli.parser import make_parser
        from treadle.core.errors import TreadleError
        from treadle.core.logs import show_logs

        use_any_text()
        args = make_parser().parse_args(argv)
    finally:
        if is_default:
            signal.signal(signal.SIGINT, signal.default_int_handler)
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


def _exit_at_once(*_: object) -> None:
    os.write(2, b"\ntreadle: interrupted\n")
    os._exit(EXIT_INTERRUPTED)
