"""`treadle explain`: explain a recorded run."""

import argparse
import json
import webbrowser
from pathlib import Path

from treadle.core.errors import UsageError
from treadle.page import standalone_page
from treadle.trace.recording import Recording


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "explain",
        help="explain a recorded run",
        description="Explain a run that was recorded with --record (or LLM(record=…)). Show the step table or the "
        "history of one request, or write a web page for stepping through the run, or a trace for Perfetto "
        "(ui.perfetto.dev) and chrome://tracing.",
    )
    parser.add_argument("recording", type=Path, metavar="RUN.jsonl", help="the recording")
    parser.add_argument("--request", metavar="ID", help="show the history of this request")
    parser.add_argument("--steps", metavar="FIRST-LAST", help="show only these steps")
    parser.add_argument(
        "--web", action="store_true", help="write RUN.html, a page that shows the recording, and open it"
    )
    parser.add_argument(
        "--output", type=Path, metavar="OUT.html", help="with --web: write this file instead, and do not open it"
    )
    parser.add_argument("--chrome-trace", type=Path, metavar="OUT.json", help="write a trace for Perfetto")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    recording = Recording(args.recording)
    if args.output is not None and not args.web:
        raise UsageError("--output", "is only valid with --web")
    if args.web:
        _write_page(recording, args.recording, args.output)
    elif args.chrome_trace is not None:
        try:
            args.chrome_trace.write_text(json.dumps(recording.chrome_trace()), encoding="utf-8")
        except OSError as error:
            raise UsageError("--chrome-trace", f"{args.chrome_trace} cannot be written ({error})") from error
        print(f"{args.chrome_trace}: {len(recording.records)} steps; open it in ui.perfetto.dev or chrome://tracing")
    elif args.request is not None:
        print(recording.history(args.request))
    else:
        print(recording.table(*_step_range(args.steps)))
    return 0


def _write_page(recording: Recording, source: Path, output: Path | None) -> None:
    path = output or source.with_suffix(".html")
    try:
        path.write_text(standalone_page(source.name, [recording.header, *recording.records]), encoding="utf-8")
    except OSError as error:
        raise UsageError("--output", f"{path} cannot be written ({error})") from error
    is_shown = output is None and webbrowser.open(path.resolve().as_uri())
    print(f"{path}: {len(recording.records)} steps" + ("" if is_shown else "; open it in a browser"))


def _step_range(text: str | None) -> tuple[int | None, int | None]:
    if text is None:
        return None, None
    first, _, last = text.partition("-")
    if not first.isdigit() or not (last or first).isdigit():
        raise UsageError("--steps", f"must be a range FIRST-LAST or one step number, got {text!r}")
    return int(first), int(last or first)
