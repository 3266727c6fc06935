"""Grammars, compared with brute force over the vocabulary."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from support.examples import examples
from treadle.core.errors import InvalidRequestError
from treadle.core.structured_outputs import StructuredOutputsParams
from treadle.text.grammar import GrammarCompiler

CHOICES = ["yes", "no", "yellow", 'say "no"', "a\nb", "Grüße 😀", "none at all"]


@pytest.fixture(scope="module")
def compiler(embedded_model):
    return GrammarCompiler(embedded_model.tokenizer, embedded_model.config.vocab_size, embedded_model.eos_token_ids)


@pytest.fixture(scope="module")
def token_bytes(embedded_model):
    """Return the bytes of every token, converted from GPT-2's printable characters; None for special tokens."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    stands_for = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    tokenizer = embedded_model.tokenizer
    return [
        None
        if i in tokenizer.special_token_ids
        else bytes(stands_for[char] for char in tokenizer.backend.id_to_token(i))
        for i in range(embedded_model.config.vocab_size)
    ]


def allowed(matcher, vocab_size):
    mask = allocate_token_bitmask(1, vocab_size)
    fill_next_token_bitmask(matcher.backend, mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def brute_force(choices, text, token_bytes, eos_ids):
    """Return the tokens after which a choice is still reachable, and end-of-sequence if a choice is complete."""
    wanted = [choice.encode() for choice in choices]
    found = {
        i
        for i, piece in enumerate(token_bytes)
        if piece and any(choice.startswith(text + piece) for choice in wanted)
    }
    return found | (set(eos_ids) if text in wanted else set())


def test_masks_equal_brute_force_at_every_token(compiler, token_bytes, embedded_model):
    eos = embedded_model.eos_token_ids
    grammar = compiler.compile(StructuredOutputsParams(choice=CHOICES))
    for choice in CHOICES:
        matcher, text, seen = grammar.matcher(), b"", []
        for token in [*embedded_model.tokenizer.encode(choice), None]:
            matcher.follow(list(seen))
            mask, expected = allowed(matcher, len(token_bytes)), brute_force(CHOICES, text, token_bytes, eos)
            if len({choice.encode()[len(text) :][:1] for choice in CHOICES if choice.encode().startswith(text)}) > 1:
                assert mask == expected
            else:  # if the next byte is certain, only the token that the tokenizer would choose is allowed
                assert mask
                assert mask <= expected
            if token is not None:
                text += token_bytes[token]
                seen.append(token)
        assert text == choice.encode()
        assert matcher.error is None


@examples(60)
@given(jumps=st.lists(st.tuples(st.sampled_from(CHOICES), st.integers(0, 12)), max_size=8))
def test_a_matcher_follows_its_sequence(compiler, embedded_model, jumps):
    """It can move backward, forward, and to another output, as in a beam search."""
    grammar = compiler.compile(StructuredOutputsParams(choice=CHOICES))
    matcher = grammar.matcher()
    for text, length in jumps:
        tokens = embedded_model.tokenizer.encode(text)[:length]
        matcher.follow(tokens)
        fresh = grammar.matcher()
        fresh.follow(tokens)
        vocab_size = embedded_model.config.vocab_size
        assert allowed(matcher, vocab_size) == allowed(fresh, vocab_size)
        assert matcher.error is None


def test_the_same_grammar_is_compiled_once(compiler):
    first, second, other = (
        compiler.compile(StructuredOutputsParams(regex=regex)) for regex in ("[a-z]+x", "[a-z]+x", "[a-z]+y")
    )
    assert first is second
    assert first is not other


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"regex": "(a"}, "unclosed group"),
        ({"json": {"type": "thing"}}, "thing"),
        ({"json": "{"}, "EOF"),
        ({"json": {"$ref": "http://localhost/x"}}, "localhost"),
        ({"json": {"$ref": "file:///etc/passwd"}}, "passwd"),
        ({"grammar": "start: nothing"}, "nothing"),
        ({"grammar": ""}, "root"),
        ({"grammar": 'root ::= "\\'}, "cannot be read"),
        ({"json": {"$ref": "#"}}, "no text"),
        ({"json": "false"}, "false"),
        ({"json": {"not": {}, "const": object()}}, "json"),
        ({"grammar": 'start: "\ud800"'}, "surrogate"),
        ({"regex": "\udc00"}, "surrogate"),
        ({"choice": ["fine", "\ud800"]}, "surrogate"),
        ({"json": {"const": "\ud800"}}, "surrogate"),
        ({"json": '{"const": "\\ud800"}'}, "hex escape"),
        ({"choice": []}, "choice"),
        ({"choice": "yes"}, "choice"),
        ({"regex": 3}, "regex"),
        ({}, "exactly one"),
        ({"regex": "a", "grammar": "b"}, "regex and grammar"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern"),
    ],
)
def test_invalid_grammars_are_refused(compiler, params, message):
    with pytest.raises(InvalidRequestError, match="structured_outputs") as error:
        compiler.compile(StructuredOutputsParams(**params))
    assert message in str(error.value)


def test_a_model_without_an_end_token_is_refused(embedded_model):
    compiler = GrammarCompiler(embedded_model.tokenizer, embedded_model.config.vocab_size, frozenset())
    with pytest.raises(InvalidRequestError, match="end-of-sequence"):
        compiler.compile(StructuredOutputsParams(regex="a"))


@pytest.mark.parametrize("schema", [True, "true", {}])
def test_a_schema_that_allows_everything_allows_any_json(compiler, embedded_model, schema):
    matcher = compiler.compile(StructuredOutputsParams(json=schema)).matcher()
    for text in ('{"a": [1, null]}', '"text"', "-3.5"):
        matcher.follow(embedded_model.tokenizer.encode(text))
        assert matcher.error is None


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"json": {"enum": ["<|im_end|>"]}}, '"<|im_end|>"'),
        ({"json": {"const": "a<|im_start|>b"}}, '"a<|im_start|>b"'),
        ({"choice": ["<|im_end|>"]}, "<|im_end|>"),
        ({"regex": r"x<\|im_end\|>"}, "x<|im_end|>"),
        ({"grammar": 'root ::= "<|endoftext|>"'}, "<|endoftext|>"),
    ],
)
def test_text_equal_to_a_control_token_consists_of_ordinary_tokens(compiler, embedded_model, params, text):
    tokenizer = embedded_model.tokenizer
    assert any(tokenizer.token_text(i) in text for i in tokenizer.special_token_ids)
    matcher, output = compiler.compile(StructuredOutputsParams(**params)).matcher(), []
    while not (ids := allowed(matcher, embedded_model.config.vocab_size)) <= embedded_model.eos_token_ids:
        assert not ids & tokenizer.special_token_ids
        output.append(min(ids))
        matcher.follow(list(output))
        assert matcher.error is None
    assert tokenizer.decode(output) == text


def test_a_grammar_may_name_a_control_token(compiler, embedded_model):
    matcher = compiler.compile(StructuredOutputsParams(grammar="start: <|im_start|>")).matcher()
    assert allowed(matcher, embedded_model.config.vocab_size) == {embedded_model.tokenizer.token_id("<|im_start|>")}
