"""End tokens: every token that the model's files, its vocabulary or its chat template use to end a turn."""

import pytest

from support.model_files import (
    ARRAY,
    CONTROL,
    STRING,
    TOKENS,
    UINT32,
    gguf_bytes,
    gguf_fields,
    gguf_tensors,
    huggingface_files,
    write_folder,
)
from treadle.models.registry import load_path
from treadle.text.chat_template import ChatTemplate

PLAIN = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }} <|{{ m.role }}_over|>\n{% endfor %}"


def gguf_model(path, names, eos=None, template=PLAIN, control=True):
    """Return a GGUF model whose tokens from id 2 on are `names`, as control tokens or ordinary tokens."""
    tokens = [*TOKENS[:2], *names, *TOKENS[2 + len(names) :]]
    kinds = [2, 3, *[3 if control else 1] * len(names), *[1] * (len(TOKENS) - 2 - len(names))]
    fields = gguf_fields() | {
        "tokenizer.ggml.tokens": ((ARRAY, STRING), tokens),
        "tokenizer.ggml.token_type": ((ARRAY, UINT32), kinds),
        "tokenizer.chat_template": (STRING, template),
    }
    del fields["tokenizer.ggml.eos_token_id"]
    if eos is not None:
        fields["tokenizer.ggml.eos_token_id"] = (UINT32, eos)
    path.write_bytes(gguf_bytes(fields, gguf_tensors()))
    return load_path(path)


@pytest.mark.parametrize(
    ("names", "eos", "ends"),
    [
        (["<|end_of_text|>", "<|eot_id|>", "<|start_header_id|>"], 2, {2, 3}),
        (["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"], None, {2, 3, 4}),
        (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], 2, {2, 4}),
        (["<start_of_turn>", "<end_of_turn>", "<eos>"], 4, {3, 4}),
        (["<|start|>", "<|end|>", "<|user|>"], None, {3}),
        (["<|return|>", "<|end|>", "<|call|>"], 2, {2, 4}),  # Harmony: <|end|> ends a message within an answer
        (["<mask>", "<tool>"], 3, {3}),
    ],
)
def test_known_control_tokens_end_a_turn(names, eos, ends, tmp_path):
    assert gguf_model(tmp_path / "model.gguf", names, eos).eos_token_ids == ends


def test_ordinary_tokens_with_the_same_text_do_not_end_a_turn(tmp_path):
    names = ["<mask>", "<|im_end|>", "<|end|>"]
    assert gguf_model(tmp_path / "model.gguf", names, 2, control=False).eos_token_ids == {2}


def test_the_token_that_the_template_puts_after_an_answer_ends_it(tmp_path):
    names = ["<|assistant|>", "<|assistant_over|>", "<|assistant_over|>>", "<|user_over|>"]
    assert gguf_model(tmp_path / "a.gguf", names, template=TURNS).eos_token_ids == {3}
    assert gguf_model(tmp_path / "b.gguf", names, template=TURNS, control=False).eos_token_ids == frozenset()
    assert gguf_model(tmp_path / "c.gguf", names, template="{{ raise_exception('no') }}").eos_token_ids == frozenset()
    assert gguf_model(tmp_path / "d.gguf", names, template="<|assistant|>").eos_token_ids == frozenset()


def test_the_longest_matching_token_ends_an_answer(tmp_path):
    names = ["<|assistant_over|>", "<|assistant_over|>\n"]
    assert gguf_model(tmp_path / "model.gguf", names, template=TURNS).eos_token_ids == {3}


def test_the_text_after_an_answer_is_found_in_the_template():
    assert ChatTemplate(PLAIN).ending() == ""
    assert ChatTemplate(TURNS).ending() == "<|assistant_over|>\n"


def folder(path, *, config=None, generation=None, eos_token=None, names=CONTROL):
    files = huggingface_files()
    files["config.json"]["eos_token_id"] = config
    files["generation_config.json"] = {"eos_token_id": generation}
    files["tokenizer_config.json"] = {"eos_token": eos_token}
    for i, name in enumerate(names):
        files["tokenizer.json"]["added_tokens"][i]["content"] = name
    files["tokenizer.json"]["model"]["vocab"] = {token: i for i, token in enumerate([*names, *TOKENS[len(names) :]])}
    return load_path(write_folder(path, files))


@pytest.mark.parametrize(
    ("named", "ends"),
    [
        ({"generation": 5, "eos_token": "e"}, {5, 8}),  # only tokenizer_config.json gives the end of a turn
        ({"generation": [5, 6], "config": 7}, {5, 6, 7}),
        ({"config": [5]}, {5}),
        ({"eos_token": "e"}, {8}),
        ({"generation": 5, "eos_token": "not a token"}, {5}),
        ({}, set()),
    ],
)
def test_end_tokens_are_collected_from_every_file_of_a_folder(named, ends, tmp_path):
    assert folder(tmp_path / "model", names=["<a>", "<b>", "<c>", "<d>"], **named).eos_token_ids == ends


def test_special_tokens_of_a_folder_end_a_turn(tmp_path):
    assert folder(tmp_path / "model", generation=5).eos_token_ids == {2, 3, 5}


def test_end_tokens_outside_the_vocabulary_are_ignored(tmp_path):
    files = huggingface_files()
    files["tokenizer.json"]["added_tokens"].append({**files["tokenizer.json"]["added_tokens"][0]})
    files["tokenizer.json"]["added_tokens"][-1] |= {"id": len(TOKENS), "content": "<|im_end|>"}
    files["tokenizer_config.json"]["eos_token"] = "<|im_end|>"
    assert load_path(write_folder(tmp_path / "model", files)).eos_token_ids == {2, 3}
