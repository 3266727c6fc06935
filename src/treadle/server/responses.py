"""Response bodies in OpenAI's format."""

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from treadle.core.errors import cut
from treadle.core.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from treadle.text.token_texts import TokenTexts

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot represent; the same value as vLLM's."""

MAX_MESSAGE_CHARS = 1000
MAX_FIELD_CHARS = 200

JSON = dict[str, Any]

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def sse(data: JSON | str) -> bytes:
    """One server-sent event."""
    text = data if isinstance(data, str) else _encode(data)
    return f"data: {text}\n\n".encode()


def usage(num_prompt_tokens: int, num_completion_tokens: int, num_cached_tokens: int) -> JSON:
    """The `usage` object."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }


def usage_of(outputs: Iterable[RequestOutput]) -> JSON:
    """The `usage` object of finished requests that were not streamed."""
    outputs = list(outputs)
    return usage(
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(len(completion.token_ids) for output in outputs for completion in output.outputs),
        sum(output.num_cached_tokens for output in outputs),
    )


def error_body(message: str, kind: str, param: str | None = None, code: str | int | None = None) -> JSON:
    """OpenAI's error object; long messages and names, which quote a request, are cut."""
    if param is not None:
        param = cut(param, MAX_FIELD_CHARS)
    return {"error": {"message": cut(message, MAX_MESSAGE_CHARS), "type": kind, "param": param, "code": code}}


def chat_logprobs(positions: Sequence[PositionLogprobs], num_top: int, texts: TokenTexts) -> JSON:
    """Log-probabilities in the chat format: {"content": [{token, logprob, bytes, top_logprobs}]}.

    A token that ends within a character has bytes but no text, and the token that completes the character has the
    text of all of it, so the bytes of all tokens join to the bytes of the answer.

    Args:
        positions: one per token.
        num_top: number of top logprobs requested.
        texts: follows the answer; takes the tokens.
    """
    content = []
    for position in positions:
        entries = [(token_id, _chat_token(entry, texts.bytes_of(token_id))) for token_id, entry in position.items()]
        token_id, own = entries[0]
        top = [(position[i].rank, token) for i, token in entries if position[i].rank <= num_top]
        top.sort(key=lambda item: item[0])
        content.append({**own, "top_logprobs": [token for _, token in top[:num_top]]})
        texts.push(token_id)
    return {"content": content}


def completion_logprobs(
    positions: Sequence[PositionLogprobs | None],
    token_ids: Sequence[int],
    num_top: int,
    texts: TokenTexts,
    offset: int = 0,
) -> JSON:
    """The completions format: parallel lists of tokens, their log-probabilities, the top ones, text offsets.

    An offset is where the token's text begins in the text of the choice, in characters. The tokens of a stop string
    have the offsets that they would have if the text included it.

    Args:
        positions: one per token; None for the first token of an echoed prompt.
        token_ids: the tokens.
        num_top: number of top logprobs requested.
        texts: follows the text; takes the tokens.
        offset: offset in the text of the choice at which the text that `texts` follows begins.
    """
    found: JSON = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for token_id, position in zip(token_ids, positions, strict=True):
        found["text_offset"].append(offset + texts.length)
        found["tokens"].append(texts.push(token_id))
        logprob: float | None = None
        top: dict[str | None, float] | None = None
        if position is not None:
            own = position[token_id]
            logprob = _finite(own.logprob)
            top = {}
            for entry in position.values():
                # Several tokens may have the same text, which then has the log-probability of the most likely one.
                if entry.rank <= max(num_top, 1) or entry is own:
                    value = _finite(entry.logprob)
                    top[entry.decoded_token] = max(value, top.get(entry.decoded_token, value))
        found["token_logprobs"].append(logprob)
        found["top_logprobs"].append(top if num_top else None)
    return found


def finish_fields(completion: CompletionOutput) -> JSON:
    """The fields finish_reason and stop_reason (vLLM's)."""
    return {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}


def prompt_logprobs(output: RequestOutput) -> list[JSON | None]:
    """Prompt logprobs in vLLM's format: per position a mapping from token id; null for the first."""
    return [
        None
        if position is None
        else {
            str(token_id): {"logprob": _finite(e.logprob), "rank": e.rank, "decoded_token": e.decoded_token}
            for token_id, e in position.items()
        }
        for position in output.prompt_logprobs or ()
    ]


def _chat_token(entry: Logprob, data: bytes) -> JSON:
    return {"token": entry.decoded_token or "", "logprob": _finite(entry.logprob), "bytes": list(data)}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB
