import hypothesis.strategies as st
import pytest
from hypothesis import given

from support.examples import examples
from support.sentencepiece import sentencepiece_metadata
from treadle.text import IncrementalDetokenizer
from treadle.text.gguf_tokenizer import tokenizer_from_gguf

SENTENCEPIECE = tokenizer_from_gguf(sentencepiece_metadata())


def pieces_of(tokenizer, ids, **options):
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    return [*(detokenizer.push([i]) for i in ids), detokenizer.flush()]


@pytest.mark.parametrize("text", ["Hello 😀 world", "日本語のテキスト", "👩‍👩‍👧‍👦 family 🇩🇪", "naïve café — ½"])
def test_no_piece_ends_inside_a_character(text, embedded_model):
    ids = embedded_model.tokenizer.encode(text)
    pieces = pieces_of(embedded_model.tokenizer, ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert len([p for p in pieces if p]) > 1


def test_an_incomplete_character_is_emitted_at_the_end(embedded_model):
    ids = embedded_model.tokenizer.encode("a😀")[:-1]
    pieces = pieces_of(embedded_model.tokenizer, ids)
    assert "".join(pieces) == embedded_model.tokenizer.decode(ids)
    assert pieces[-1].startswith("\ufffd")


@examples(300)
@given(ids=st.lists(st.integers(0, 400) | st.integers(49152, 49160), max_size=30), skip=st.booleans())
def test_pieces_join_to_the_full_decode_byte_level(ids, skip, embedded_model):
    # The first ids are special tokens and single bytes: most sequences are not valid UTF-8.
    tokenizer = embedded_model.tokenizer
    pieces = pieces_of(tokenizer, ids, skip_special_tokens=skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


UNKNOWN = st.integers(SENTENCEPIECE.vocab_size, SENTENCEPIECE.vocab_size + 5)
VALID = [i + 3 for i in "é字😀".encode()]


@examples(3000)
@given(
    ids=st.lists(
        st.one_of(st.integers(0, SENTENCEPIECE.vocab_size - 1), st.sampled_from(VALID), UNKNOWN),
        max_size=30,
    ),
    skip=st.booleans(),
)
def test_pieces_join_to_the_full_decode_byte_fallback(ids, skip):
    pieces = pieces_of(SENTENCEPIECE, ids, skip_special_tokens=skip)
    assert "".join(pieces) == SENTENCEPIECE.decode(ids, skip_special_tokens=skip)


@examples(200)
@given(text=st.text(max_size=40))
def test_decoding_inverts_encoding(text, embedded_model):
    ids = embedded_model.tokenizer.encode(text)
    decoded = embedded_model.tokenizer.decode(ids, skip_special_tokens=False)
    assert "".join(pieces_of(embedded_model.tokenizer, ids, skip_special_tokens=False)) == decoded
    if text.isascii() and text.isprintable():  # the vocabulary lacks some rare bytes
        assert decoded == text


def test_the_leading_space_of_sentencepiece_is_dropped_once():
    ids = SENTENCEPIECE.encode("the cat sat", add_special_tokens=False)
    assert "".join(pieces_of(SENTENCEPIECE, ids)) == "the cat sat"
    assert pieces_of(SENTENCEPIECE, ids)[:3] == ["the", " cat", " sat"]
