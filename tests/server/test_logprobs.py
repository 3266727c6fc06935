"""Log-probabilities of tokens that are parts of a character, and where they are in the text: streamed and whole."""

import pytest

from server.conftest import MODEL

pytestmark = pytest.mark.slow

TEXTS = ["a😀, 世界 and 👩‍👩‍👧‍👦 in 日本語", "one two three four", "naïve café — ½ 한"]
ENDS = ("<|im_end|>", "<|endoftext|>")  # the model may say either after the text


def says(text):
    """Options that make the model say `text`."""
    body = {"structured_outputs": {"choice": [text]}}
    return {"model": MODEL, "temperature": 0, "max_tokens": 200, "extra_body": body}


def joined(chunks, *names):
    """The lists of a stream's log-probabilities, put together."""
    return {name: [x for chunk in chunks for x in getattr(chunk.choices[0].logprobs, name)] for name in names}


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_answer(client, text):
    options = {
        "messages": [{"role": "user", "content": "?"}], "logprobs": True, "top_logprobs": 5, **says(text),
    }  # fmt: skip
    answer = client.chat.completions.create(**options)
    (choice,) = answer.choices
    assert choice.message.content == text
    content = choice.logprobs.content
    assert len(content) == answer.usage.completion_tokens
    *content, end = content
    assert end.token in ENDS
    assert bytes(end.bytes).decode() == end.token
    assert b"".join(bytes(token.bytes) for token in content) == text.encode()
    assert "".join(token.token for token in content) == text
    for token in content:
        for entry in [token, *token.top_logprobs]:
            assert "\ufffd" not in entry.token
            if entry.token == token.token and entry.logprob == token.logprob:
                assert entry.bytes == token.bytes
    assert text.isascii() or any(token.token == "" for token in content)
    streamed = [
        token
        for chunk in client.chat.completions.create(stream=True, **options)
        for token in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])
    ]
    assert [*content, end] == streamed


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("stop", [None, ["wo three five"], ["three", "界 an"], ["日本人", "👦 in 本", "é — "]])
def test_offsets_are_within_the_text_of_the_choice(client, text, stop):
    options = {"prompt": "Say: ", "logprobs": 2, "stop": stop, **says(text)}
    answer = client.completions.create(**options)
    (choice,) = answer.choices
    found = choice.logprobs
    assert text.startswith(choice.text)
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        assert token in ENDS or text[offset : offset + len(token)] == token
        assert "\ufffd" not in token
    assert found.text_offset == sorted(found.text_offset)
    for top, token, logprob in zip(found.top_logprobs, found.tokens, found.token_logprobs, strict=True):
        assert top[token] >= logprob  # another token may have the same text, such as a part of a character
    chunks = list(client.completions.create(stream=True, **options))
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    streamed = joined(chunks, "tokens", "text_offset", "token_logprobs", "top_logprobs")
    assert streamed == {name: getattr(found, name) for name in streamed}


@pytest.mark.parametrize("as_ids", [False, True])
def test_offsets_of_an_echo_are_within_the_echoed_text(server, client, as_ids):
    said, prompt = TEXTS[0], "<|im_start|>語 " + TEXTS[2]
    ids = server.built.tokenizer.encode(prompt)
    options = {"prompt": ids if as_ids else prompt, "echo": True, "logprobs": 1, **says(said)}
    (choice,) = client.completions.create(**options).choices
    assert choice.text == prompt + said
    found = choice.logprobs
    assert found.tokens[-1] in ENDS
    assert "".join(found.tokens[:-1]) == choice.text
    assert found.text_offset == [len("".join(found.tokens[:i])) for i in range(len(found.tokens))]
    assert "\ufffd" not in "".join(found.tokens)
    assert found.text_offset.count(len(prompt)) >= 1


def test_prompt_logprobs_have_the_texts_of_the_prompt(client):
    body = {"prompt_logprobs": 1, "return_token_ids": True}
    options = {"model": MODEL, "prompt": TEXTS[0], "max_tokens": 1, "temperature": 0}
    choice = client.completions.create(extra_body=body, **options).choices[0].model_dump()
    ids = choice["prompt_token_ids"]
    positions = zip(ids[1:], choice["prompt_logprobs"][1:], strict=True)
    assert "".join(position[str(token_id)]["decoded_token"] for token_id, position in positions) == TEXTS[0][1:]
    assert not any("\ufffd" in e["decoded_token"] for p in choice["prompt_logprobs"][1:] for e in p.values())


def test_choices_of_one_stream_have_their_own_offsets(client):
    options = {"model": MODEL, "prompt": ["😀", "Once upon a time"], "max_tokens": 12, "temperature": 1.0, "n": 2}
    found = {}
    for chunk in client.completions.create(stream=True, logprobs=0, seed=4, **options):
        (choice,) = chunk.choices
        found.setdefault(choice.index, []).extend(choice.logprobs.text_offset)
    whole = client.completions.create(logprobs=0, seed=4, **options)
    assert found == {choice.index: choice.logprobs.text_offset for choice in whole.choices}
    assert all(offsets[0] == 0 for offsets in found.values())
