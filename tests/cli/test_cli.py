"""The command, run in a separate process: its output and its exit status."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import treadle

pytestmark = pytest.mark.slow

FAST = ["--dtype", "float32", "--max-model-len", "512", "--num-kv-blocks", "64"]


def run(*args, stdin=None, timeout=300):
    return subprocess.run(
        [sys.executable, "-m", "treadle", *args], input=stdin, capture_output=True, text=True, timeout=timeout
    )


def test_version_and_help():
    assert run("--version").stdout == f"treadle {treadle.__version__}\n"
    assert run("--help").stdout.count("\n    ") >= 3
    for command in ("generate", "chat", "models"):
        result = run(command, "--help")
        assert result.returncode == 0
        assert "default" in result.stdout or command == "models"


def test_one_prompt_is_streamed_with_a_summary():
    result = run("generate", "The capital of France is", "--max-tokens", "8", *FAST)
    assert result.returncode == 0
    assert result.stdout.startswith(" Paris")
    assert "KV pool: 64 blocks of 16 = 1024 tokens" in result.stderr
    last = result.stderr.strip().splitlines()[-1]
    for part in ("8 tokens in", "tokens/s", "first token after", "8 steps", "of 64 KV blocks"):
        assert part in last


def test_chat_question():
    result = run("-q", "generate", "--chat", "What is the capital of Japan?", *FAST)
    assert result.stdout == "The capital of Japan is Tokyo.\n"


def test_steps_of_three_requests(tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Hello there\n\nThe quick brown fox jumps over the lazy dog and\nOnce upon a time\n")
    result = run(
        "generate", "--file", str(prompts), "--steps", "--max-tokens", "4", "--max-num-seqs", "4",
        "--max-num-batched-tokens", "8", *FAST,
    )  # fmt: skip
    assert result.returncode == 0
    assert result.stdout.count("── ") == 3
    table = result.stderr[result.stderr.index(" step") :]
    assert "prefill 2 of 2" in table
    assert "prefill 4 of 10" in table  # half of the step is for the prompts behind a long one
    assert "prefill 4+6 of 10" in table
    assert "decode" in table


def test_standard_input():
    result = run("-q", "generate", "-", "--max-tokens", "3", *FAST, stdin="The capital of France is")
    assert result.stdout.startswith(" Paris")


def test_a_conversation_keeps_its_history_and_reuses_its_prefix():
    result = run(
        "-q",
        "chat",
        "--max-tokens",
        "24",
        *FAST,
        stdin="Hi, I am Ada.\nWhat is 1+1?\n/nonsense\n/new\nHi\n/exit\n",
    )
    assert result.returncode == 0
    assert "0 of 36 prompt tokens cached" in result.stderr
    cached = [int(line.split(", ")[1].split()[0]) for line in result.stderr.splitlines() if "cached)" in line]
    assert len(cached) == 3
    assert cached[1] > 32
    assert "unknown command /nonsense" in result.stderr
    assert "(new conversation)" in result.stderr


def test_a_conversation_that_is_too_long_is_reported_and_can_be_restarted():
    result = run("-q", "chat", "--max-tokens", "8", *FAST, stdin="word " * 600 + "\nHi\n")
    assert result.returncode == 0
    assert "at most 511 leave room" in result.stderr
    assert "/new starts a new conversation" in result.stderr
    assert result.stdout.strip()


def test_models_lists_models_and_formats():
    result = run("models")
    assert "smollm2-135m-instruct  9" in result.stdout
    assert "Q6_K" in result.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generate"], "give at least one prompt"),
        (["generate", ""], "prompt: is empty"),
        (["generate", "x", "--max-tokens", "0"], "max_tokens: must be at least 1, got 0"),
        (["generate", "x", "--temperature", "-1"], "temperature: must be in [0, 1e+06], got -1"),
        (
            ["generate", "x", "--scheduler", "best"],
            "unknown phase policy 'best'; known: chunked, phased, prefill-first, three-phase",
        ),
        (["generate", "x", "--model", "nope"], "there is no model 'nope'"),
        (["generate", "--file", "/nope"], "--file: /nope cannot be read"),
        (["generate", "x", "--bogus"], "unrecognized arguments: --bogus"),
        ([], "required: COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
    ],
)
def test_errors_are_one_line(args, message):
    result = run(*args)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_ctrl_c_exits_cleanly():
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "treadle", "generate", "Once upon a time", "--ignore-eos", "--max-tokens", "480",
         *FAST],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stdout.read(10)  # it has started to generate
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert errors.endswith("treadle: interrupted\n")
    assert "Traceback" not in errors


def test_a_closed_pipe_is_not_an_error():
    read, write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "treadle", "-q", "generate", "Once", "--max-tokens", "200", "--ignore-eos", *FAST],
        stdout=write, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    os.close(write)
    os.read(read, 4)
    os.close(read)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0
    assert "Traceback" not in errors


def test_a_second_run_gives_the_same_output(tmp_path):
    args = ["-q", "generate", "Once upon a time", "--temperature", "1", "--max-tokens", "12", *FAST]
    assert run(*args).stdout == run(*args).stdout


def test_interrupt_during_loading():
    process = subprocess.Popen(
        [sys.executable, "-m", "treadle", "generate", "x", *FAST],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    maps = Path(f"/proc/{process.pid}/maps")
    deadline = time.monotonic() + 30
    while "libtorch" not in maps.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode in (130, 0)  # 0 if it was faster
    assert "Traceback" not in errors


@pytest.mark.parametrize("args", [["serve", "--port", "0"], ["generate", "x"], ["--help"]])
@pytest.mark.parametrize("file", ["_typing", "_multiarray"])  # loaded early and late in the imports
def test_interrupt_during_the_first_imports(args, file):
    process = subprocess.Popen(
        [sys.executable, "-m", "treadle", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    maps = Path(f"/proc/{process.pid}/maps")
    while process.poll() is None and file not in maps.read_text():
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (130, "\ntreadle: interrupted\n")
