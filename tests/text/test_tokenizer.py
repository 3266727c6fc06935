import pytest

from support.real_prompts import TEXTS
from support.sentencepiece import sentencepiece_metadata
from treadle.core.errors import ModelLoadError, UnsupportedModelError
from treadle.core.metadata import ModelMetadata
from treadle.text.gguf_tokenizer import eos_token_ids_from_gguf, tokenizer_from_gguf
from treadle.text.tokenizer import Tokenizer

BYTES = 3  # id of <0x00>


@pytest.mark.parametrize("text", [*TEXTS, "", " ", "  two  spaces\n\n\ttabs", "don't 12345 ﬁ e\u0301"])
def test_the_embedded_tokenizer_equals_transformers(text, embedded_model, oracle_tokenizer):
    ids = embedded_model.tokenizer.encode(text)
    assert ids == oracle_tokenizer.encode(text)
    assert embedded_model.tokenizer.decode(ids) == oracle_tokenizer.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def test_every_numeral_is_a_separate_word(embedded_model):
    # As in training. transformers loses this rule when it rebuilds the tokenizer from GGUF, which affects numerals
    # that are not ASCII digits.
    tokenizer = embedded_model.tokenizer
    assert tokenizer.encode(" ½") == [*tokenizer.encode(" "), *tokenizer.encode("½")]


def test_batches_equal_single_texts(embedded_model):
    tokenizer = embedded_model.tokenizer
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]


def test_special_tokens_are_one_token_each(embedded_model):
    tokenizer = embedded_model.tokenizer
    assert tokenizer.encode("<|im_start|>user<|im_end|>")[0] == tokenizer.token_id("<|im_start|>")
    assert tokenizer.encode("<|im_start|>user<|im_end|>")[-1] == tokenizer.token_id("<|im_end|>")


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes():
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata())
    tokens = sentencepiece_metadata()["tokenizer.ggml.tokens"]
    ids = tokenizer.encode("the cat é字")
    assert [tokens[i] for i in ids] == ["<s>", "▁the", "▁cat", "▁", "<0xC3>", "<0xA9>", "字"]
    assert tokenizer.decode(ids) == "the cat é字"
    assert tokenizer.byte_values == {BYTES + i: i for i in range(256)}


def test_bos_is_taken_from_the_file_or_else_from_the_tokenizer_kind():
    metadata = sentencepiece_metadata()
    assert tokenizer_from_gguf(metadata).encode("the")[0] == 1
    assert tokenizer_from_gguf(sentencepiece_metadata(add_bos_token=False)).encode("the")[0] != 1
    assert tokenizer_from_gguf(sentencepiece_metadata(add_eos_token=True)).encode("the")[-1] == 2
    assert 1 not in tokenizer_from_gguf(metadata).encode("the", add_special_tokens=False)


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("llama-bpe", "a 12345 don't\n", ["a", " ", "123", "45", " don", "'t", "\n"]),
        ("qwen2", "a 123 don't\n", ["a", " ", "1", "2", "3", " don", "'t", "\n"]),
        ("tekken", "aB CDef 12", ["a", "B", " CDef", " ", "1", "2"]),
        ("smollm", "a 12", ["a", " ", "1", "2"]),
        ("gpt-2", "a 12 b", ["a", " 12", " b"]),
    ],
)
def test_pre_tokenizers_split_words_as_in_training(pre, text, words):
    alphabet = sorted(set("".join(words).replace(" ", "Ġ").replace("\n", "Ċ")))
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": alphabet,
        "tokenizer.ggml.merges": [],
    }
    tokenizer = tokenizer_from_gguf(ModelMetadata(metadata, "model.gguf"))
    pieces = tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)
    assert [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in pieces] == words


def test_errors_name_an_unknown_tokenizer_kind():
    with pytest.raises(UnsupportedModelError, match="'rwkv' is not supported; supported are 'gpt2'"):
        tokenizer_from_gguf(sentencepiece_metadata(model="rwkv"))
    with pytest.raises(UnsupportedModelError, match="'mystery' is not supported; supported are default, gpt-2"):
        tokenizer_from_gguf(sentencepiece_metadata(model="gpt2", pre="mystery"))
    with pytest.raises(ModelLoadError, match=r"no vocabulary \(tokenizer.ggml.tokens\)"):
        tokenizer_from_gguf(ModelMetadata({"tokenizer.ggml.model": "gpt2"}, "model.gguf"))


def test_an_invalid_tokenizer_json_is_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(ModelLoadError, match=r"tokenizer.json: cannot be read as a tokenizer"):
        Tokenizer.from_file(path)


def test_every_end_of_turn_token_is_an_end_token():
    metadata = sentencepiece_metadata(eos_token_id=5, eot_token_id=7, eom_token_id=5)
    assert eos_token_ids_from_gguf(metadata, 10) == {5, 7}
    with pytest.raises(ModelLoadError, match=r"model\.gguf: .*eot_token_id must be an integer from 0 to 6, got 7"):
        eos_token_ids_from_gguf(metadata, 7)
