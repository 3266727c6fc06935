"""Text that is not ASCII, in locales that are: it is read as UTF-8, or refused in one line."""

import os
import subprocess
import sys

import pytest

from support.model_files import huggingface_files, write_folder
from treadle.cli.options import as_text
from treadle.core.errors import UsageError

pytestmark = pytest.mark.slow

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
LOCALES = pytest.mark.parametrize(
    "locale", [{"LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "utf-8"}, ASCII], ids=["utf-8", "ascii"]
)
NOT_UTF8 = b"caf\xe9"


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    files = huggingface_files()
    files["tokenizer.json"]["model"] = {
        "type": "WordLevel", "unk_token": "<unk>",
        "vocab": {"\u00e9" if token == "a" else token: i for token, i in files["tokenizer.json"]["model"]["vocab"].items()},
    }  # fmt: skip
    files["tokenizer.json"] |= {"pre_tokenizer": {"type": "Whitespace"}, "decoder": None}
    folder = write_folder(tmp_path_factory.mktemp("text") / "model", files)
    return ["--model", str(folder), "--num-kv-blocks", "8", "--swap-space", "0", "--max-tokens", "2"]


def run(*args, locale, stdin=b""):
    result = subprocess.run(
        [sys.executable, "-m", "treadle", "-q", *args],
        input=stdin, capture_output=True, timeout=300, env={**os.environ, **locale},
    )  # fmt: skip
    assert b"Traceback" not in result.stderr
    return result


@LOCALES
@pytest.mark.parametrize(
    ("args", "name"),
    [
        (["generate", NOT_UTF8], b"PROMPT"),
        (["generate", "--system", NOT_UTF8, "--chat", "b"], b"--system"),
        (["generate", "--stop", NOT_UTF8, "b"], b"--stop"),
        (["generate", "--regex", NOT_UTF8, "b"], b"--regex"),
        (["generate", "-"], b"PROMPT"),
        (["chat", "--system", NOT_UTF8], b"--system"),
        (["bench", "serve", "--model", NOT_UTF8], b"--model"),
        (["bench", "serve", "--api-key", NOT_UTF8], b"--api-key"),
    ],
)
def test_text_that_is_not_utf8(args, name, locale, options):
    result = run(*args, *(options if args[0] != "bench" else []), locale=locale, stdin=NOT_UTF8)
    assert result.returncode == 2
    assert result.stderr.startswith(b"treadle: error: " + name + b": must be text in UTF-8, got 'caf\\udce9'")
    assert result.stderr.count(b"\n") == 1


@LOCALES
@pytest.mark.parametrize("option", ["--file", "--model", "--record", "--json-schema"])
def test_files_that_are_not_utf8(option, locale, options):
    result = run("generate", "b", *options, option, b"/nowhere/" + NOT_UTF8, locale=locale)
    assert result.returncode == 2
    assert b"/nowhere/caf\\udce9" in result.stderr
    assert result.stderr.count(b"\n") == 1


@LOCALES
def test_text_that_is_not_ascii(locale, options):
    def shown(text):
        return text.encode(locale["PYTHONIOENCODING"], "backslashreplace")

    prompt, also = "\u00e9 b", "\u00e9\u2192"
    result = run("generate", prompt, also, "--stop", "\u00fc", *options, locale=locale)
    assert result.returncode == 0
    assert shown(f"\u2500\u2500 {prompt!r}\n") in result.stdout
    assert shown(f"\u2500\u2500 {also!r}\n") in result.stdout
    piped = run(
        "generate", "-", "--chat", *options, "--max-tokens", "8", "--ignore-eos", locale=locale, stdin=prompt.encode()
    )
    assert piped.returncode == 0
    assert (
        run("generate", prompt, "--chat", *options, "--max-tokens", "8", "--ignore-eos", locale=locale).stdout
        == piped.stdout
    )


@LOCALES
def test_a_conversation_survives_a_line_that_is_not_utf8(locale, options):
    result = run("chat", *options, locale=locale, stdin=NOT_UTF8 + b"\nb \xc3\xa9\n/\xe9\n/exit\n")
    assert result.returncode == 0
    assert b"message: must be text in UTF-8, got 'caf\\udce9'" in result.stderr
    assert b"unknown command /\\udce9" in result.stderr
    assert result.stderr.count(b"first token after") == 1
    assert result.stdout.strip()


def test_surrogates_stand_for_bytes():
    assert as_text("PROMPT", "caf\udcc3\udca9") == as_text("PROMPT", "caf\u00e9") == "caf\u00e9"
    for text in ("\udce9", "\ud800"):
        with pytest.raises(UsageError, match="PROMPT: must be text in UTF-8"):
            as_text("PROMPT", text)
