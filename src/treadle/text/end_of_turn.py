"""Finds the tokens that end an answer, also those that a model's files do not list as end-of-sequence ids."""

from treadle.text.chat_template import ChatTemplate
from treadle.text.tokenizer import Tokenizer

END_TOKENS = frozenset(
    (
        "</s>", "<eos>", "[EOS]", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>",
        "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<end_of_turn>", "<turn|>",
        "<end_of_utterance>", "<EOT>", "_<EOT>", "[EOT]", "<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>",
    )
)  # fmt: skip
"""Texts of control tokens that end a text, a turn or a message in some family of models, as llama.cpp lists them."""

# Harmony's <|end|> ends a message within an answer; <|return|> and <|call|> end the answer.
_HARMONY = frozenset(("<|return|>", "<|call|>", "<|end|>"))


def end_token_ids(tokenizer: Tokenizer, template: ChatTemplate | None) -> frozenset[int]:
    """Ids of the control tokens that end an answer: those known by their text, and the one with which the chat
    template closes an assistant's message."""
    special = {tokenizer.backend.id_to_token(token_id): token_id for token_id in tokenizer.special_token_ids}
    found = END_TOKENS & special.keys()
    if special.keys() >= _HARMONY:
        found -= {"<|end|>"}
    ending = "" if template is None else template.ending()
    closing = [token for token in special if token and ending.startswith(token)]
    return frozenset(special[token] for token in (*found, *sorted(closing, key=len)[-1:]))
