"""Treadle without the packages of the optional extras, and the errors of features that need one of them."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from support.tiny import make_model

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
EXTRAS = {
    name: [requirement.split(">")[0].replace("-", "_") for requirement in PROJECT["optional-dependencies"][name]]
    for name in ("serve", "bench", "structured")
}
BLOCK = "import sys\nfor name in {}: sys.modules[name] = None\n"
ALL = sorted({package for packages in EXTRAS.values() for package in packages})


def run_without(packages, code, *args):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", BLOCK.format(packages) + code, *args],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make_model("tiny", folder)
    return str(folder)


def test_a_plain_llm_needs_no_extra(folder):
    assert {"fastapi", "uvicorn", "aiohttp", "llguidance", "prometheus_client"} <= set(ALL)
    code = """
import treadle
from treadle import LLM, SamplingParams
from treadle.core.errors import InvalidRequestError

llm = LLM(sys.argv[1], num_kv_blocks=8, swap_space=0, log_stats_interval_s=0)
(output,) = llm.generate([5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
assert len(output.outputs[0].token_ids) == 4
try:
    llm.generate([5, 6, 7], SamplingParams(structured_outputs={"regex": "a"}), use_tqdm=False)
except InvalidRequestError as error:
    print(error)
"""
    result = run_without([*ALL, "starlette", "pydantic"], code, folder)
    assert result.returncode == 0, result.stderr
    assert result.stdout == (
        "structured_outputs: an answer of a given form needs the package llguidance, which is not installed; "
        "pip install 'treadle[structured]'\n"
    )


COMMAND = "from treadle.cli.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.parametrize(
    ("extra", "package", "args"),
    [
        ("serve", "fastapi", ["serve"]),
        ("serve", "uvicorn", ["serve"]),
        ("serve", "prometheus_client", ["serve"]),
        ("bench", "aiohttp", ["bench", "serve"]),
        ("bench", "uvloop", ["bench", "serve"]),
    ],
)
def test_the_error_of_a_command_names_the_missing_extra(extra, package, args):
    assert package in EXTRAS[extra]
    result = run_without([package], COMMAND, *args)
    assert result.returncode == 2
    assert result.stderr == (
        f"treadle: error: treadle {' '.join(args)} needs the package {package}, which is not installed; "
        f"pip install 'treadle[{extra}]'\n"
    )


def test_help_needs_no_extra():
    result = run_without([*ALL, "starlette", "pydantic", "torch"], COMMAND, "serve", "--help")
    assert result.returncode == 0
    assert "--max-num-seqs" in result.stdout


def test_the_development_set_up_has_every_extra():
    groups = PROJECT["optional-dependencies"]
    assert "treadle[all]" in groups["dev"]
    assert groups["all"] == [f"treadle[{','.join(EXTRAS)}]"]
