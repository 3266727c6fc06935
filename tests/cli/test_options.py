"""Settings are declared once: their checks, options and documentation are generated from the declarations."""

import argparse
import runpy
from dataclasses import fields
from pathlib import Path

import pytest

from treadle.assembly.engine_config import EngineConfig
from treadle.cli import chat, generate, serve
from treadle.cli.options import engine_options, option_name
from treadle.core.config import SchedulerConfig, SchedulingSettings
from treadle.core.errors import ConfigError
from treadle.core.settings import settings_of

DOCS = Path(__file__).parents[2] / "docs"
NAMES = [entry.name for entry in fields(EngineConfig)]


def parser_of(command):
    commands = argparse.ArgumentParser().add_subparsers()
    command.add_parser(commands)
    (parser,) = commands.choices.values()
    return parser


def given(command, *args):
    return engine_options(parser_of(command).parse_args(args))


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_has_help_an_option_and_a_row_in_the_docs(name):
    declared = settings_of(EngineConfig)[name]
    assert len(declared.help) > 10
    assert not declared.help.endswith(".")
    option = option_name(name)
    for command in (serve, generate, chat):
        (action,) = [a for a in parser_of(command)._actions if option in a.option_strings]
        is_ours = action.dest == f"engine.{name}"
        assert is_ours == (name != "seed" or command is serve)  # in other commands --seed sets the seed of requests
        if is_ours:
            assert declared.help in action.help
            assert declared.default_in_words in action.help
    assert f"| `{name}` | `{option}` | {declared.default_in_words} | {declared.help}" in (
        DOCS / "settings.md"
    ).read_text(encoding="utf-8")


def test_the_settings_page_is_up_to_date():
    page = runpy.run_path(str(DOCS / "make_settings.py"))["page"]()
    assert page == (DOCS / "settings.md").read_text(encoding="utf-8"), "run `make docs`"


def test_options_are_parsed_to_their_types():
    assert given(serve) == {}
    assert given(
        serve, "--max-num-seqs", "3", "--swap-space", "0.5", "--kv-cache-memory", "512M", "--no-enable-prefix-caching",
        "--check-invariants", "--quantization", "int8", "--seed", "7", "--age-limit-s", "none",
    ) == {
        "max_num_seqs": 3, "swap_space": 0.5, "kv_cache_memory": "512M", "enable_prefix_caching": False,
        "check_invariants": True, "quantization": "int8", "seed": 7, "age_limit_s": None,
    }  # fmt: skip
    assert given(generate, "x", "--age-limit-s", "2.5", "--seed", "7") == {"age_limit_s": 2.5}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--max-num-seqs", "many"], "argument --max-num-seqs: invalid int value: 'many'"),
        (["--age-limit-s", "old"], "argument --age-limit-s: invalid float value: 'old'"),
    ],
)
def test_an_option_of_the_wrong_type_is_refused(args, message, capsys):
    with pytest.raises(SystemExit):
        given(serve, *args)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name in NAMES if settings_of(EngineConfig)[name].low is not None])
def test_every_count_is_checked_against_its_declared_minimum(name):
    low = settings_of(EngineConfig)[name].low
    with pytest.raises(ConfigError, match=f"^{name}: must be at least {low}, got {low - 1}$"):
        EngineConfig(**{name: low - 1})
    with pytest.raises(ConfigError, match=f"^{name}: must be an integer, got 'x'$"):
        EngineConfig(**{name: "x"})


@pytest.mark.parametrize("name", [name for name in NAMES if settings_of(EngineConfig)[name].choices])
def test_every_choice_is_checked_against_the_declared_choices(name):
    allowed = ", ".join(map(str, settings_of(EngineConfig)[name].choices))
    with pytest.raises(ConfigError, match=f"^{name}: must be one of {allowed}; got 'other'$"):
        EngineConfig(**{name: "other"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"age_limit_s": 0}, "age_limit_s: must be greater than 0 or None, got 0"),
        ({"log_stats_interval_s": -1}, "log_stats_interval_s: must be at least 0, got -1"),
        ({"swap_space": -1}, "swap_space: must be a number of GiB, at least 0; got -1"),
    ],
)
def test_other_invalid_settings_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


def test_every_scheduling_setting_reaches_the_scheduler():
    changed = {
        "order": "priority", "preemption_mode": "swap", "admission_headroom": 3, "max_consecutive_prefills": 2,
        "age_limit_s": None, "max_num_queued_requests": 5, "max_num_queued_tokens": 50, "seed": 9, "max_num_seqs": 4,
        "max_num_batched_tokens": 40, "max_model_len": 77, "long_prefill_token_threshold": 9,
        "scheduler": "phased", "victim_policy": "least-computed",
    }  # fmt: skip
    assert changed.keys() == {entry.name for entry in fields(SchedulingSettings)}
    config = EngineConfig(**changed).scheduler_config(77)
    assert config == SchedulerConfig(**changed)
