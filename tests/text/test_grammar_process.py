"""Grammars that crash or stall the compiler process affect only their own request."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from treadle.core.errors import InvalidRequestError
from treadle.core.structured_outputs import StructuredOutputsParams
from treadle.text import grammar_process
from treadle.text.grammar import GrammarCompiler

PATIENCE_S = 120


@pytest.fixture
def compiler(embedded_model):
    return GrammarCompiler(embedded_model.tokenizer, embedded_model.config.vocab_size, embedded_model.eos_token_ids)


def chain(length, sign=":", start="start"):
    rules = [f'r{i}{sign} "a" r{i + 1}' for i in range(length)]
    return "\n".join([f"{start}{sign} r0", *rules, f'r{length}{sign} "b"'])


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def first_mask(compiler):
    """Return the tokens that a control request allows, compiled by the process and not taken from the cache."""
    grammar = compiler.compile(StructuredOutputsParams(regex="[a-z]+ [0-9]{3}"))
    return np.frombuffer(grammar.matcher().backend.compute_bitmask(), dtype=np.uint8).tolist()


REFUSED = [
    ({"grammar": chain(4000)}, "nested"),
    ({"grammar": "root ::= " + "(" * 900 + '"a"' + ")" * 900}, "nested"),
    ({"grammar": "root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000}, "nested"),
    ({"regex": "((a{1000}){1000}){1000}"}, "too complex"),
    ({"regex": "(" * 10_000 + "a" + ")" * 10_000}, "invalid regex"),
    ({"json": nested(300)}, "recursion limit"),
    ({"json": '{"anyOf":[' * 20_000 + "true" + "]}" * 20_000}, "recursion limit"),
    (
        {"json": {"$ref": "#/$defs/0", "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(3500)}}},
        "structured_outputs",
    ),
    (
        {"json": {"allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(40)]}},
        "too large",
    ),
]


@pytest.mark.slow
def test_each_attack_is_refused_and_changes_nothing_for_others(compiler, embedded_model):
    calm = first_mask(compiler)
    for params, message in REFUSED:
        with pytest.raises(InvalidRequestError, match=message) as error:
            compiler.compile(StructuredOutputsParams(**params))
        assert error.value.field == "structured_outputs"
        assert len(str(error.value)) < 500
        again = GrammarCompiler(
            embedded_model.tokenizer, embedded_model.config.vocab_size, embedded_model.eos_token_ids
        )
        again.process = compiler.process
        assert first_mask(again) == calm


def test_python_objects_that_are_nested_too_deeply_are_refused():
    with pytest.raises(InvalidRequestError, match="nested"):
        StructuredOutputsParams(json=nested(5000))


def test_grammars_accepted_by_the_process_compile_in_the_engine(compiler, embedded_model):
    """For chains of rules around the limit: those that the process accepts do not crash this process."""
    accepted = []
    for length in (1000, 2000, 2600, 3200, 3800):
        try:
            compiler.compile(StructuredOutputsParams(grammar=chain(length)))
        except InvalidRequestError:
            continue
        accepted.append(length)
    assert 1000 in accepted
    assert 3800 not in accepted


def test_the_process_is_reused_and_replaced_after_a_crash(compiler):
    pids = []
    for grammar in ('start: "a"', 'start: "b"', chain(4000), 'start: "c"', 'start: "d"'):
        try:
            compiler.compile(StructuredOutputsParams(grammar=grammar))
            pids.append(compiler.process.pid)
        except InvalidRequestError:
            assert compiler.process.pid is None
    assert pids[0] == pids[1]
    assert pids[1] != pids[2]
    assert pids[2] == pids[3]


def test_a_killed_process_is_replaced(compiler):
    compiler.compile(StructuredOutputsParams(regex="a"))
    process = compiler.process._process
    process.kill()
    process.wait()
    compiler.compile(StructuredOutputsParams(regex="b"))
    assert compiler.process.pid != process.pid


def test_a_process_that_does_not_answer_is_replaced(compiler, monkeypatch):
    compiler.compile(StructuredOutputsParams(regex="a"))
    pid = compiler.process.pid
    os.kill(pid, signal.SIGSTOP)
    limited = compiler.process
    monkeypatch.setattr(limited, "limits", replace(limited.limits, wall_s=0.2))
    with pytest.raises(InvalidRequestError, match="to compile; simplify"):
        compiler.compile(StructuredOutputsParams(regex="b"))
    monkeypatch.undo()
    compiler.compile(StructuredOutputsParams(regex="b"))
    assert compiler.process.pid != pid


@pytest.mark.slow
def test_a_grammar_that_takes_too_long_is_refused(compiler):
    """GBNF is converted in Python in quadratic time, which is half a minute for this grammar."""
    grammar = chain(4000, " ::=", "root")
    with pytest.raises(InvalidRequestError, match=f"more than {grammar_process.LIMITS.cpu_s} s of CPU time"):
        compiler.compile(StructuredOutputsParams(grammar=grammar))
    compiler.compile(StructuredOutputsParams(regex="a"))


def test_known_grammars_do_not_wait_for_new_ones(compiler):
    """While the process is stopped, grammars that it compiled before are still available."""
    known = compiler.compile(StructuredOutputsParams(regex="a"))
    pid = compiler.process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        new = compiler.submit(StructuredOutputsParams(regex="b"))
        assert compiler.compile(StructuredOutputsParams(regex="a")) is known
        assert not new.done()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert new.result(PATIENCE_S).text != known.text


def test_the_memory_for_answers_is_bounded(compiler, monkeypatch):
    monkeypatch.setattr("treadle.text.grammar.KEPT_ANSWER_BYTES", 20_000)
    asked = []
    compile_there = compiler.process.compile
    monkeypatch.setattr(compiler.process, "compile", lambda params: asked.append(params) or compile_there(params))
    for i in range(4):  # each takes some 6 kB: the text of the regular expression, twice
        compiler.compile(StructuredOutputsParams(regex=f"[a-z]{{{i + 1}}}" + "b" * 3000))
    compiler.compile(StructuredOutputsParams(regex="[a-z]{4}" + "b" * 3000))
    assert len(asked) == 4  # the newest is known
    compiler.compile(StructuredOutputsParams(regex="[a-z]{1}" + "b" * 3000))
    assert len(asked) == 5  # the oldest is not
    with pytest.raises(InvalidRequestError):
        compiler.compile(StructuredOutputsParams(regex="(" + "a" * 30_000))  # too large to be kept at all
    compiler.compile(StructuredOutputsParams(regex="[a-z]{1}" + "b" * 3000))
    assert len(asked) == 7
    assert compiler._answer_bytes == sum(answer.num_bytes(key) for key, answer in compiler._answers.items())
    assert 0 < compiler._answer_bytes <= 20_000


def test_two_requests_with_the_same_grammar_compile_once(compiler, monkeypatch):
    asked = []
    compile_there = compiler.process.compile
    monkeypatch.setattr(compiler.process, "compile", lambda params: asked.append(params) or compile_there(params))
    futures = [compiler.submit(StructuredOutputsParams(regex="[ab]{3}")) for _ in range(5)]
    assert len({id(future.result(PATIENCE_S)) for future in futures}) == 1
    assert len(asked) == 1


SCRIPT = """
from treadle.core.config import DEFAULT_MODEL
from treadle.core.structured_outputs import StructuredOutputsParams
from treadle.models.registry import find_model, load_path
from treadle.text.grammar import GrammarCompiler

model = load_path(find_model(DEFAULT_MODEL))
compiler = GrammarCompiler(model.tokenizer, model.config.vocab_size, model.eos_token_ids)
compiler.compile(StructuredOutputsParams(regex="a"))
print(compiler.process.pid, flush=True)
input()
"""


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # no such process; ESRCH while the process exits
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize("how", ["end", "kill"])
def test_the_process_ends_with_its_parent(tmp_path, how):
    """The parent is a plain script without an `if __name__ == "__main__"` guard."""
    (tmp_path / "script.py").write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, "-W", "error", tmp_path / "script.py"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as parent:  # fmt: skip
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        assert os.getpgid(pid) != os.getpgid(parent.pid)  # so that Ctrl-C in a terminal does not reach it
        if how == "kill":
            parent.kill()
            parent.communicate()
        else:
            _, errors = parent.communicate("\n")
            assert errors == ""
            assert parent.returncode == 0
    deadline = time.monotonic() + PATIENCE_S
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_tokenizer_that_grammars_cannot_use(tiny):
    process = grammar_process.GrammarProcess(tiny.loaded.tokenizer, tiny.loaded.config.vocab_size, [2])
    with pytest.raises(InvalidRequestError, match="structured_outputs: are not possible with this model's tokenizer"):
        process.compile('{"regex": "a"}')
    assert process.pid is None
