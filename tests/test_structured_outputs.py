"""Structured outputs of whole engines: constraints hold, schedules change nothing, failures stay isolated."""

import json
import re

import llguidance
import pytest

from support.engines import TestEngine
from support.native import native_library
from treadle import SamplingParams
from treadle.backends.cpu.model import NativeModel
from treadle.core.errors import InvalidRequestError
from treadle.text.grammar import Grammar

pytestmark = pytest.mark.slow

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORMS = [
    {"json": SCHEMA, "disable_any_whitespace": True},
    {"regex": r"[A-Z][a-z]{2,8} \d{2}-\d{4}"},
    {"choice": ["yes", "no", 'perhaps "so"', "ü\n😀"]},
    {"grammar": 'root ::= "<" item ("," item)* ">"\nitem ::= [a-c]{1,4}'},
    {"json_object": True, "whitespace_pattern": " ?"},
]


def keeps(form, text):
    if "json" in form:
        value = json.loads(text)
        return (
            list(value) == ["name", "age", "tags"]
            and len(value["name"]) <= 12
            and 0 <= value["age"] <= 120
            and set(value["tags"]) <= {"red", "green"}
            and len(value["tags"]) <= 3
            and text == json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        )
    if "json_object" in form:
        return isinstance(json.loads(text), dict)
    if "choice" in form:
        return text in form["choice"]
    return re.fullmatch(form.get("regex", "<[a-c]{1,4}(,[a-c]{1,4})*>"), text) is not None


@pytest.fixture(scope="module")
def model(embedded_model):
    return NativeModel(
        embedded_model.config,
        embedded_model.weights,
        library=native_library(),
        weight_format="int8",
        max_model_len=2048,
    )


@pytest.fixture
def engine(embedded_model, model):
    return lambda **options: TestEngine(embedded_model, model, **options)


def params(form, number, **options):
    options = {"temperature": 1.0, "seed": number, "max_tokens": 90, **options}
    return SamplingParams(structured_outputs=form, **options)


def run(engine, n=1, **options):
    for i in range(15):
        engine.add(
            str(i), f"Write item {i} in the form that was asked for: ", params(FORMS[i % 5], i, n=n, **options)
        )
    return engine.run()


@pytest.mark.parametrize("n", [1, 3])
def test_outputs_obey_their_constraint_and_are_equal_under_every_schedule(engine, n):
    calm = run(engine(num_blocks=1000, max_num_seqs=64), n)
    kept = 0
    for name, output in calm.items():
        for completion in output.outputs:
            if completion.finish_reason == "stop":
                kept += 1
                assert keeps(FORMS[int(name) % 5], completion.text), completion.text
    assert kept >= 12 * n
    for mode in ("recompute", "swap"):
        pressed = engine(
            num_blocks={1: 16, 3: 42}[n], block_size=8, num_host_blocks=200, max_num_seqs=24, max_num_batched_tokens=24,
            preemption_mode=mode, admission_headroom=0, max_model_len=16 * 8,
        )  # fmt: skip
        results = run(pressed, n)
        modes = {p.mode for output in results.values() for p in output.metrics.preemptions}
        assert mode in modes
        for name, output in calm.items():
            assert [o.token_ids for o in results[name].outputs] == [o.token_ids for o in output.outputs]


def test_beams_respect_the_constraint(engine):
    own = engine()
    own.add("beams", "A person: ", params(FORMS[0], 0, n=3, use_beam_search=True, temperature=0.0))
    outputs = own.run()["beams"].outputs
    assert len({output.text for output in outputs}) == 3
    assert all(keeps(FORMS[0], output.text) for output in outputs)


def test_constrained_requests_honour_other_sampling_parameters(engine):
    """Log-probabilities are unmodified, a complete text overrides min_tokens, and stop strings take effect."""
    own = engine()
    own.add("plain", "Answer: ", SamplingParams(temperature=0.0, max_tokens=1, logprobs=5))
    own.add("logprobs", "Answer: ", params({"choice": ["zebra"]}, 0, logprobs=5))
    own.add("min", "Answer: ", params({"choice": ["yes"]}, 0, min_tokens=20))
    own.add("stop", "Answer: ", params({"choice": ["one, two, three"]}, 0, stop=["two"]))
    own.add("bias", "Answer: ", params({"regex": "[ab]{6}"}, 0, logit_bias={64: 100.0, 65: -100.0}))
    results = own.run()
    first, free = results["logprobs"].outputs[0].logprobs[0], results["plain"].outputs[0].logprobs[0]
    best = {token: entry.logprob for token, entry in free.items()}
    assert {token: entry.logprob for token, entry in first.items() if entry.rank <= 5} == best
    assert results["logprobs"].outputs[0].text == "zebra"
    assert results["min"].outputs[0].text == "yes"
    assert results["stop"].outputs[0].text == "one, "


def test_a_grammar_that_becomes_too_complex_ends_only_its_own_request(engine, embedded_model):
    limits = llguidance.LLParserLimits(step_max_items=400)
    vocabulary = llguidance.LLTokenizer(
        embedded_model.tokenizer.backend.to_str(),
        n_vocab=embedded_model.config.vocab_size,
        eos_token=sorted(embedded_model.eos_token_ids),
    )
    grammar = llguidance.LLMatcher.grammar_from_lark('start: s\ns: s s s | "a" | "aa"')
    limited = Grammar("limited", llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=limits))
    own = engine(find_grammar=lambda text: limited if text == "limited" else own.inputs.grammars.find(text))
    for n in (1, 2):
        bad = own.add(f"bad {n}", "aaaa", params({"grammar": 'start: "a"'}, 1, n=n, min_tokens=80))
        bad.grammar = limited
    own.add("good", "aaaa", params({"regex": "a{40}b"}, 1))
    results = own.run()
    assert keeps({"regex": "a{40}b"}, results["good"].outputs[0].text)
    for n in (1, 2):
        assert "structured_outputs" in results[f"bad {n}"].error
        assert all(output.finish_reason == "error" for output in results[f"bad {n}"].outputs)


def test_incompatible_parameters_are_refused():
    for name, value in (("ignore_eos", True), ("allowed_token_ids", [1, 2])):
        with pytest.raises(InvalidRequestError, match=name):
            SamplingParams(structured_outputs={"regex": "a"}, **{name: value})
    with pytest.raises(InvalidRequestError, match="must be a mapping"):
        SamplingParams(structured_outputs="json")
