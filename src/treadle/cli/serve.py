"""`treadle serve`: an OpenAI-compatible HTTP server."""

import argparse
import contextlib
import ctypes
import gc
import json
import logging
import math
import os
import resource
import signal
import socket

from treadle.cli.options import add_engine_options, as_text, engine_options
from treadle.core.errors import UsageError
from treadle.core.extras import extra

logger = logging.getLogger("treadle")

M_ARENA_MAX = -8
"""glibc's number of this option of mallopt."""

MOST_OPEN_FILES = 2**16

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

EXAMPLES = """examples:
  treadle serve
  treadle serve --quantization int8 --port 9000
  curl localhost:8000/v1/chat/completions -H 'content-type: application/json' \\
       -d '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 50}'
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "serve",
        help="serve an OpenAI-compatible API over HTTP",
        description="Serve a model over HTTP, with an OpenAI-compatible API and vLLM's extensions.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model_name", nargs="?", metavar="MODEL", help="same as --model")
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine only)"
    )
    group.add_argument(
        "--port", type=int, default=8000, help="port to listen on; 0 selects a free port (default: %(default)s)"
    )
    group.add_argument("--api-key", help="key that clients must send (or set TREADLE_API_KEY)")
    group.add_argument(
        "--allowed-hosts",
        type=lambda text: [name.strip() for name in text.split(",") if name.strip()],
        metavar="NAME,…",
        help="names that the Host header of a request may hold, such as api.example.com,*.example.com; * for any "
        "(default: the names of the loopback address if --host is one, else any)",
    )
    group.add_argument(
        "--allowed-origins",
        type=_origins,
        default=[],
        metavar="JSON",
        help="origins of web pages elsewhere that may use the API (CORS), as a JSON list such as "
        "'[\"https://app.example.com\"]'; '[\"*\"]' for any (default: none)",
    )
    group.add_argument("--served-model-name", help="name of the model in the API (default: the value of --model)")
    group.add_argument(
        "--max-body-mib", type=float, default=8.0, help="maximum size of a request body in MiB (default: %(default)s)"
    )
    group.add_argument(
        "--shutdown-grace",
        type=float,
        default=10.0,
        help="seconds to wait at shutdown for unfinished requests (default: %(default)s)",
    )
    add_engine_options(parser)
    parser.set_defaults(run=run)


def _origins(text: str) -> list[str]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(origin, str) for origin in found):
        raise argparse.ArgumentTypeError(f"must be a JSON list of strings, got {text!r}")
    return found


def _api_key(given: str | None) -> str | None:
    """The key from the command line or the environment; UsageError if no client could send it."""
    option = "TREADLE_API_KEY" if given is None else "--api-key"
    key = os.environ.get("TREADLE_API_KEY") if given is None else given
    if key is None:
        return None
    try:
        key = key.encode("utf-8", "surrogateescape").decode("utf-8")  # whatever the locale
    except UnicodeError:
        raise UsageError(option, "must be text in UTF-8") from None  # an error shows no secret
    if not key or key != key.strip(" \t"):
        raise UsageError(option, "must not be empty, or begin or end with a blank")
    if any(character < " " or character == "\x7f" for character in key):
        raise UsageError(option, "must not hold control characters, such as a line break: a header cannot carry them")
    return key


def _check_address(host: str, port: int) -> None:
    """Raise UsageError, before a model is loaded, if the server could not listen there."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UsageError("--host", f"{host!r} is not an address of this machine ({error})") from None
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(address)
            except OSError as error:
                reason = (
                    f"cannot listen on {host}:{port} ({error.strerror}); give another --port, or 0 for a free one"
                )
                raise UsageError("--port", reason) from None


def _allow_open_files() -> None:
    """Raise the limit on open files: every connection needs a file, and the usual limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _limit_arenas() -> None:
    """Let all threads share two arenas of malloc: with one for each, large bodies leave holes in all of them."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 2)


def _freeze_objects() -> None:
    """Exempt the 200,000 objects created at startup from garbage collection: each full collection took 0.1 s."""
    gc.collect()
    gc.freeze()


def run(args: argparse.Namespace) -> int:
    if not 0 <= args.port < 65536:
        raise UsageError("--port", f"must be between 0 and 65535, got {args.port}")
    if not 0 < args.max_body_mib < math.inf:
        raise UsageError("--max-body-mib", f"must be greater than 0, got {args.max_body_mib}")
    if not 0 <= args.shutdown_grace < math.inf:
        raise UsageError("--shutdown-grace", f"must be a number of seconds, at least 0, got {args.shutdown_grace}")
    api_key = _api_key(args.api_key)
    _check_address(args.host, args.port)
    _limit_arenas()
    with extra("serve", "treadle serve"):
        from treadle.server.app import create_app
        from treadle.server.http import HttpServer
        from treadle.server.middleware import hosts_for
    from treadle.assembly.build import build_engine
    from treadle.assembly.engine_config import EngineConfig

    options = engine_options(args)
    if args.model_name is not None:
        options["model"] = args.model_name
    config = EngineConfig(**options)
    model_name = as_text("--served-model-name", args.served_model_name or config.model)
    app = create_app(
        build_engine(config),
        model_name=model_name,
        api_key=api_key,
        max_body_bytes=int(args.max_body_mib * 2**20),
        allowed_hosts=args.allowed_hosts or hosts_for(args.host),
        allowed_origins=args.allowed_origins,
    )

    _allow_open_files()
    server = HttpServer(
        app,
        host=args.host,
        port=args.port,
        log_level="warning" if args.quiet else "info",
        grace_s=args.shutdown_grace,
    )
    # uvicorn handles these signals while it runs, and then raises them again for the handlers that were there before.
    # A signal that comes before it runs must not be lost; one that comes after it changes nothing about the end.
    for number in STOP_SIGNALS:
        signal.signal(number, server.handle_exit)
    _freeze_objects()
    server.run()
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    return 0 if server.started else 1
