"""Command-line options shared by several commands: the settings of EngineConfig and of SamplingParams.

torch is not imported until a model is needed, so that `--help` and usage errors respond at once.
"""

import argparse
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from treadle.assembly.engine_config import EngineConfig
from treadle.core.errors import UsageError
from treadle.core.settings import Setting, settings_of, value_type

_PREFIX = "engine."
"""Prefix of the engine's options among the parsed arguments; some other options have the same names."""


def add_engine_options(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """Add an option for each setting of EngineConfig.

    Args:
        parser: the parser of a command.
        without: settings that get no option.
    """
    groups: dict[str, Any] = {}
    for name, declared in settings_of(EngineConfig).items():
        if name in without:
            continue
        if declared.group not in groups:
            groups[declared.group] = parser.add_argument_group(f"engine, {declared.group}")
        groups[declared.group].add_argument(
            option_name(name),
            dest=_PREFIX + name,
            default=argparse.SUPPRESS,
            help=_help(declared),
            **_form(name, declared),
        )


def option_name(setting: str) -> str:
    """Return the option of a setting, for instance "--max-num-seqs" for "max_num_seqs"."""
    return f"--{setting.replace('_', '-')}"


def _help(declared: Setting) -> str:
    default = declared.default_in_words
    return (f"{declared.help} (default: {default})" if default else declared.help).replace("%", "%%")


def _form(name: str, declared: Setting) -> dict[str, Any]:
    """Return the keyword arguments of `add_argument` that say how to parse the option."""
    kind, is_optional = value_type(EngineConfig, name)
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction if declared.default else "store_true"}
    metavar = declared.metavar or {int: "N", float: "X", str: "NAME"}[kind]
    if declared.choices:
        metavar = f"{{{','.join(declared.choice_texts)}}}"
    reads: Callable[[str], Any] = kind
    if is_optional and declared.default is not None:
        reads = _or_none(kind)
    return {"type": reads, "metavar": metavar}


def _or_none(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        return None if text == "none" else kind(text)

    read.__name__ = getattr(kind, "__name__", "value")  # argparse shows this name in its errors
    return read


def add_sampling_options(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """Add the sampling options.

    Args:
        parser: the parser of a command.
        max_tokens: default of --max-tokens.
    """
    group = parser.add_argument_group("sampling (defaults: the model's generation config, or else greedy)")
    group.add_argument(
        "--max-tokens", type=int, default=max_tokens, help="maximum number of output tokens (default: %(default)s)"
    )
    group.add_argument("--temperature", type=float, help="0 is greedy")
    group.add_argument(
        "--top-p", type=float, help="sample from the most likely tokens up to this cumulative probability"
    )
    group.add_argument("--top-k", type=int, help="sample from this many most likely tokens")
    group.add_argument(
        "--min-p", type=float, help="exclude tokens less likely than this fraction of the most likely one"
    )
    group.add_argument("--seed", type=int, help="seed that makes sampling reproducible")
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="stop the output at this text (may be repeated)"
    )
    group.add_argument("--json-schema", metavar="FILE", help="constrain the output to JSON that matches this schema")
    group.add_argument("--regex", help="constrain the output to text that matches this regular expression")
    group.add_argument("--ignore-eos", action="store_true", help="continue after the end-of-sequence token")


def as_text(option: str, value: str) -> str:
    """Text from the command line or from standard input, read as UTF-8 also where the locale is not.

    Args:
        option: its name, for the error.
        value: with surrogates for bytes that Python could not decode, as in `sys.argv`.

    Raises:
        UsageError: it is not UTF-8.
    """
    try:
        return value.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError as error:
        raise UsageError(option, f"must be text in UTF-8, got {value!r} ({error})") from error


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine settings given on the command line, as keyword arguments of LLM and EngineConfig."""
    return {name.removeprefix(_PREFIX): value for name, value in vars(args).items() if name.startswith(_PREFIX)}


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling options given on the command line, as keyword arguments of SamplingParams.

    Raises UsageError if the file of --json-schema cannot be read.
    """
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "ignore_eos")
    options = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.stop is not None:
        options["stop"] = [as_text("--stop", stop) for stop in args.stop]
    regex = None if args.regex is None else as_text("--regex", args.regex)
    form = {"json": _read_schema(args.json_schema), "regex": regex}
    given = {name: value for name, value in form.items() if value is not None}
    return {**options, "structured_outputs": given} if given else options


def _read_schema(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("--json-schema", f"{path} cannot be read ({error})") from error
