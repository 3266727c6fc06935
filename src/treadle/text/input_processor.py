"""Turns prompts into validated Requests."""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex, TypedDict

from treadle.core.config import RequestLimits
from treadle.core.errors import InvalidRequestError
from treadle.core.lora import LoRARequest
from treadle.core.request import Request
from treadle.core.sampling_params import SamplingParams
from treadle.text.grammar import GrammarCompiler
from treadle.text.tokenizer import Tokenizer


class TextPrompt(TypedDict, total=False):
    """A prompt as text, with options."""

    prompt: str
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids, with options."""

    prompt_token_ids: Sequence[int]
    cache_salt: str


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
"""What a caller may pass as one prompt."""

MAX_NAME_CHARS = 512
"""Limit on the name of a tenant, and on a cache salt."""

_PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}


def check_name(field: str, name: str) -> None:
    """Raise InvalidRequestError if the name in `field` is too long."""
    if len(name) > MAX_NAME_CHARS:
        raise InvalidRequestError(field, f"must have at most {MAX_NAME_CHARS} characters, got {len(name)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOptions:
    """Scheduling options of a request.

    Attributes:
        priority: lower goes first, under the order `priority`.
        tenant: the tenant that it counts for, under the order `fair`.
        deadline_s: seconds from now until it should be finished, under the order `deadline`.
        lora_request: its LoRA adapter.
    """

    priority: int = 0
    tenant: str = ""
    deadline_s: float | None = None
    lora_request: LoRARequest | None = None

    def __post_init__(self) -> None:
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise InvalidRequestError("priority", f"must be an integer, got {self.priority!r}")
        if abs(self.priority) >= 2**53:  # priorities are compared as floats
            raise InvalidRequestError("priority", f"must be between -2**53 and 2**53, got {self.priority}")
        if not isinstance(self.tenant, str):
            raise InvalidRequestError("tenant", f"must be a string, got {self.tenant!r}")
        check_name("tenant", self.tenant)
        if self.deadline_s is not None and not self.deadline_s > 0:
            raise InvalidRequestError("deadline_s", f"must be greater than 0, got {self.deadline_s!r}")
        if self.lora_request is not None and not isinstance(self.lora_request, LoRARequest):
            raise InvalidRequestError("lora_request", f"must be a LoRARequest, got {self.lora_request!r}")


@dataclass(frozen=True, slots=True)
class _ParsedPrompt:
    text: str | None
    token_ids: Sequence[Any] | None
    cache_salt: str | None


class InputProcessor:
    """Tokenizes and validates prompts.

    Args:
        tokenizer: the model's tokenizer.
        limits: limits on requests.
        eos_token_ids: the model's end-of-sequence ids.

    Attributes:
        grammars: compiles what requests ask for; a runner finds compiled grammars here.
    """

    def __init__(self, tokenizer: Tokenizer, limits: RequestLimits, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._eos_token_ids = eos_token_ids
        self.grammars = GrammarCompiler(tokenizer, limits.vocab_size, eos_token_ids)

    def make_requests(
        self,
        request_ids: Sequence[str],
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        options: Sequence[RequestOptions],
        *,
        arrival_time: float,
        add_special_tokens: bool = True,
    ) -> list[Request]:
        """Make one Request per prompt.

        Args:
            request_ids: one per prompt.
            prompts: text, token ids, or mappings.
            params: one per prompt.
            options: one per prompt.
            arrival_time: seconds on the engine's clock.
            add_special_tokens: whether to add the model's special tokens, such as BOS, to texts.

        Raises:
            InvalidRequestError: a prompt or its parameters are invalid; it names the first such prompt.
        """
        parsed = [_parse(prompt) for prompt in prompts]
        for i, prompt in enumerate(parsed):
            if prompt.text is not None:
                self.check_length("prompt" if len(parsed) == 1 else f"prompts[{i}]", len(prompt.text))
        texts = [prompt.text for prompt in parsed if prompt.text is not None]
        encoded = iter(self._tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens))
        requests = []
        for i, (request_id, prompt, param, option) in enumerate(
            zip(request_ids, parsed, params, options, strict=True)
        ):
            token_ids = next(encoded) if prompt.token_ids is None else prompt.token_ids
            try:
                requests.append(self._make_request(request_id, prompt, token_ids, param, option, arrival_time))
            except InvalidRequestError as error:
                if len(parsed) == 1:
                    raise
                raise InvalidRequestError(f"prompts[{i}]", str(error), error.code) from error
        return requests

    def check_length(self, field: str, num_chars: int) -> None:
        """Refuse a text that is too long however it is tokenized: tokenizing 8 MiB takes seconds.

        Args:
            field: the field of the request that holds the text.
            num_chars: its length.

        Raises:
            InvalidRequestError: it has more characters than the model's length can hold.
        """
        if num_chars > self._limits.max_model_len * self._tokenizer.max_token_chars:
            raise InvalidRequestError(
                field,
                f"this model's maximum context length is {self._limits.max_model_len} tokens; a text of {num_chars} "
                f"characters has more",
                code="context_length_exceeded",
            )

    def _make_request(
        self,
        request_id: str,
        prompt: _ParsedPrompt,
        token_ids: Sequence[Any],
        params: SamplingParams,
        options: RequestOptions,
        arrival_time: float,
    ) -> Request:
        self._limits.check(token_ids, params)
        stop_ids = frozenset(map(operator.index, params.stop_token_ids or ()))
        if not params.ignore_eos:
            stop_ids |= self._eos_token_ids
        allowed = params.allowed_token_ids
        if params.min_tokens and allowed is not None and stop_ids.issuperset(map(operator.index, allowed)):
            raise InvalidRequestError(
                "min_tokens",
                f"is {params.min_tokens}, but every id in allowed_token_ids ends the output",
            )
        structured = params.structured_outputs
        return Request(
            request_id,
            token_ids,
            params,
            stop_token_ids=stop_ids,
            arrival_time=arrival_time,
            priority=options.priority,
            tenant=options.tenant,
            deadline=math.inf if options.deadline_s is None else arrival_time + options.deadline_s,
            lora=options.lora_request,
            cache_salt=prompt.cache_salt,
            prompt=prompt.text,
            grammar=None if structured is None else self.grammars.compile(structured),
        )


def as_prompt_list(prompts: Any) -> list[Prompt]:
    """`prompts` as a list: one prompt (text, token ids, mapping) becomes a list of one."""
    if isinstance(prompts, (str, Mapping)) or _is_token_ids(prompts):
        return [prompts]
    if isinstance(prompts, Sequence) and not isinstance(prompts, (bytes, bytearray)):
        return list(prompts)
    raise InvalidRequestError(
        "prompts",
        f"must be text, a list of token ids, a mapping with 'prompt' or 'prompt_token_ids', or a list of "
        f"these; got {type(prompts).__name__}",
    )


def _is_token_ids(prompt: Any) -> bool:
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, (str, bytes, bytearray))
        and len(prompt) > 0
        and isinstance(prompt[0], SupportsIndex)
    )


def _parse(prompt: Any) -> _ParsedPrompt:
    cache_salt = None
    if isinstance(prompt, Mapping):
        unknown = set(prompt) - _PROMPT_KEYS
        if unknown:
            raise InvalidRequestError(
                "prompt", f"unknown key {sorted(map(str, unknown))[0]!r}; valid keys are {sorted(_PROMPT_KEYS)}"
            )
        if ("prompt" in prompt) == ("prompt_token_ids" in prompt):
            raise InvalidRequestError("prompt", "give exactly one of 'prompt' and 'prompt_token_ids'")
        cache_salt = prompt.get("cache_salt")
        if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
            raise InvalidRequestError("cache_salt", f"must be a non-empty string, got {cache_salt!r}")
        check_name("cache_salt", cache_salt or "")
        if "prompt" in prompt:
            prompt = prompt["prompt"]
            if not isinstance(prompt, str):
                raise InvalidRequestError("prompt", f"must be a string, got {type(prompt).__name__}")
        else:
            prompt = prompt["prompt_token_ids"]
            if isinstance(prompt, str):
                raise InvalidRequestError("prompt_token_ids", "must be a list of integers, got a string")
    if isinstance(prompt, str):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                "prompt", f"{prompt[error.start]!r} at character {error.start} is half a surrogate pair, no character"
            ) from None
        return _ParsedPrompt(prompt, None, cache_salt)
    if hasattr(prompt, "tolist"):  # an array or a tensor
        prompt = prompt.tolist()
    if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
        raise InvalidRequestError(
            "prompt", f"must be text, a list of token ids or a mapping; got {type(prompt).__name__}"
        )
    return _ParsedPrompt(None, prompt, cache_salt)
