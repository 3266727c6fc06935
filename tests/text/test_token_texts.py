import hypothesis.strategies as st
import pytest
import tokenizers
from hypothesis import given
from tokenizers import AddedToken, decoders, models

from support.examples import examples
from support.sentencepiece import sentencepiece_metadata
from treadle.text.gguf_tokenizer import tokenizer_from_gguf
from treadle.text.token_texts import TokenTexts
from treadle.text.tokenizer import Tokenizer

SENTENCEPIECE = tokenizer_from_gguf(sentencepiece_metadata())
TEXTS = ["Hello 😀 world", "日本語のテキスト", "👩‍👩‍👧‍👦 family 🇩🇪", "naïve café — ½", "the cat 字字 sat\n"]


def follow(tokenizer, ids, **options):
    """The texts, bytes and offsets of the tokens, and what follows them."""
    texts = TokenTexts(tokenizer, **options)
    found = [(texts.length, texts.text_of(i), texts.bytes_of(i), texts.push(i)) for i in ids]
    offsets, likely, data, pushed = map(list, zip(*found, strict=True)) if found else ([], [], [], [])
    assert pushed == likely or "\ufffd" in "".join(pushed)
    return pushed, data, offsets, texts


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", ["byte-level", "byte-fallback"])
def test_a_character_belongs_to_the_token_that_completes_it(text, name, embedded_model):
    tokenizer = embedded_model.tokenizer if name == "byte-level" else SENTENCEPIECE
    if name == "byte-fallback":  # without what becomes <unk>
        text = "".join(char for char in text if not char.isascii() or char in "thecats ")
        text = text.removeprefix(" ")
    ids = tokenizer.encode(text, add_special_tokens=False)
    pushed, data, offsets, texts = follow(tokenizer, ids)
    assert "".join(pushed) == text
    assert b"".join(data) == text.encode()
    assert offsets == [len("".join(pushed[:i])) for i in range(len(ids))]
    assert texts.length == len(text)
    assert "\ufffd" not in "".join(pushed)


def test_alternatives_are_told_without_being_taken(embedded_model):
    tokenizer = embedded_model.tokenizer
    *start, end = tokenizer.encode("😀")
    texts = TokenTexts(tokenizer)
    assert [texts.push(i) for i in start] == [""] * len(start)
    letter = tokenizer.encode("a")[0]
    assert texts.text_of(letter) == "a"  # the part before it is lost
    assert texts.text_of(end) == "😀"
    assert texts.bytes_of(end) == "😀".encode()[-len(texts.bytes_of(end)) :]
    assert TokenTexts(tokenizer).text_of(end) == ""
    assert texts.push(end) == "😀"


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_their_text(skip, embedded_model):
    tokenizer = embedded_model.tokenizer
    ids = tokenizer.encode("a<|im_end|>b", add_special_tokens=False)
    pushed, data, offsets, _ = follow(tokenizer, ids, skip_special_tokens=skip)
    assert pushed == ["a", "<|im_end|>", "b"]
    assert b"".join(data) == b"a<|im_end|>b"
    assert offsets == ([0, 1, 1] if skip else [0, 1, 11])


def test_added_tokens_outside_the_alphabet_are_their_text():
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "Ġ": 1, "ä": 2}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<｜end▁of▁turn｜>", normalized=False), AddedToken("  ", normalized=False)])
    tokenizer = Tokenizer(backend)
    assert [tokenizer.token_bytes(i) for i in range(6)] == [
        b"a", b" ", b"\xe4", "<｜end▁of▁turn｜>".encode(), b"  ", b"",
    ]  # fmt: skip


def test_the_space_before_the_first_word_is_not_part_of_a_text():
    ids = SENTENCEPIECE.encode("the cat", add_special_tokens=False)
    assert follow(SENTENCEPIECE, ids)[:3] == (["the", " cat"], [b"the", b" cat"], [0, 3])
    assert SENTENCEPIECE.token_bytes(ids[0]) == b" the"


def test_wordpiece():
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "sea": 2, "##s": 3}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    assert follow(Tokenizer(backend), [2, 3, 1])[:3] == (["sea", "s", " a"], [b"sea", b"s", b" a"], [0, 3, 4])


@examples(300)
@given(ids=st.lists(st.integers(0, 400) | st.integers(49152, 49160), max_size=30), skip=st.booleans())
def test_lengths_are_those_of_the_text_byte_level(ids, skip, embedded_model):
    tokenizer = embedded_model.tokenizer
    texts = follow(tokenizer, ids, skip_special_tokens=skip)[-1]
    text = tokenizer.decode([*ids, tokenizer.encode("a")[0]], skip_special_tokens=skip)
    assert texts.length <= len(text) - 1 <= texts.length + 1  # a part at the end becomes a character


IDS = st.integers(0, SENTENCEPIECE.vocab_size - 1) | st.sampled_from([i + 3 for i in "é字😀".encode()])


@examples(3000)
@given(ids=st.lists(IDS, max_size=30), skip=st.booleans())
def test_lengths_are_those_of_the_text_byte_fallback(ids, skip):
    word = SENTENCEPIECE.token_id("a")
    texts = follow(SENTENCEPIECE, [*ids, word], skip_special_tokens=skip)[-1]
    assert texts.length == len(SENTENCEPIECE.decode([*ids, word], skip_special_tokens=skip))
