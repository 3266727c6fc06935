"""Sampling and stopping parameters of a request. Names and defaults are those of vLLM's SamplingParams."""

import math
import numbers
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsIndex

from treadle.core.errors import InvalidRequestError
from treadle.core.structured_outputs import StructuredOutputsParams

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this mean greedy sampling: dividing by them would overflow."""

MOST = 1e6
"""Maximum temperature and repetition penalty, because both are applied in float32."""

MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
"""Maximum number of stop strings and length of each: all of them are searched for after every token."""

MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
"""Maximum number of biased tokens, as in OpenAI's API; each of the `n` sequences has its own copy."""


FLAGS = ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output", "use_beam_search")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample the tokens of one request, and when to stop.

    Attributes:
        n: sequences to generate for the prompt, which is computed once; with beam search, the beam width.
        temperature: 0 is greedy; otherwise logits are divided by it before sampling.
        top_p: keep the smallest set of most likely tokens whose probability reaches this; in (0, 1].
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        min_p: drop tokens less likely than this fraction of the most likely one; in [0, 1].
        repetition_penalty: divides positive logits and multiplies negative logits of tokens seen in prompt or
            output; values above 1 discourage repetition (Keskar et al. 2019, CTRL).
        presence_penalty: subtracted once from the logit of every token in the output so far; in [-2, 2].
        frequency_penalty: subtracted once per occurrence of a token in the output so far; in [-2, 2].
        seed: makes the request's noise reproducible, regardless of the rest of the batch; -2**63 to 2**64 - 1, where
            a negative number stands for itself plus 2**64. If None, the engine derives a seed from its own seed and
            the request's arrival number.
        stop: strings that end the text; excluded from it unless `include_stop_str_in_output` is set. At most
            MAX_STOP_STRINGS of at most MAX_STOP_CHARS characters.
        stop_token_ids: token ids that end the sequence, besides the model's end-of-sequence ids; at most
            MAX_STOP_TOKEN_IDS.
        ignore_eos: do not stop at the model's end-of-sequence ids.
        max_tokens: maximum number of tokens to generate; None means up to the model's length.
        min_tokens: minimum number of tokens before an end-of-sequence id, stop id or stop string may end the output.
        logit_bias: token id → bias added to its logit; biases are clamped to [-100, 100]. At most MAX_LOGIT_BIAS.
        allowed_token_ids: sample only from these ids.
        logprobs: report the log-probabilities of the sampled token and of this many most likely tokens.
        prompt_logprobs: the same for every prompt token but the first.
        detokenize: produce text; if False, the text is empty and `stop` is not allowed.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the stop string, or the stop token's text, in the text.
        use_beam_search: keep the `n` most likely continuations instead of sampling.
        length_penalty: beam search divides a sequence's log-probability by its length to this power.
        early_stopping: beam search ends at the first `n` finished sequences (True), when a better one is unlikely
            (False), or when a better one is impossible ("never").
        structured_outputs: a constraint on the text, also as a mapping. It overrides `min_tokens` where the text is
            complete and only its end is allowed.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    structured_outputs: StructuredOutputsParams | None = None

    stop_strings: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """`stop` as a tuple."""

    def __post_init__(self) -> None:
        _check_int("n", self.n, low=1)
        _check_number("temperature", self.temperature, low=0.0, high=MOST)
        _check_number("top_p", self.top_p, low=0.0, high=1.0, open_low=True)
        _check_number("min_p", self.min_p, low=0.0, high=1.0)
        _check_number("repetition_penalty", self.repetition_penalty, low=1 / MOST, high=MOST)
        _check_number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _check_number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        _check_int("top_k", self.top_k, low=-1, high=2**31 - 1, hint="0 or -1 keeps all tokens")
        _check_int("min_tokens", self.min_tokens, low=0)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, low=1, hint="None means up to the model's length")
            if self.min_tokens > self.max_tokens:
                raise InvalidRequestError(
                    "min_tokens", f"must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}"
                )
        if self.seed is not None:
            _check_int("seed", self.seed, low=-(2**63), high=2**64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _check_int(name, value, low=0)
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise InvalidRequestError(
                    "logit_bias",
                    f"must map token ids to numbers, got {_short(self.logit_bias)}",
                )
            _check_count("logit_bias", self.logit_bias, MAX_LOGIT_BIAS)
            for token_id, bias in self.logit_bias.items():
                _check_number(f"logit_bias[{token_id!r}]", bias)
        for name in ("stop_token_ids", "allowed_token_ids"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Collection)):
                raise InvalidRequestError(name, f"must be a list of token ids, got {_short(value)}")
        _check_count("stop_token_ids", self.stop_token_ids or (), MAX_STOP_TOKEN_IDS)
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(name, f"must be True or False, got {_short(getattr(self, name))}")
        if self.allowed_token_ids is not None and len(self.allowed_token_ids) == 0:
            raise InvalidRequestError("allowed_token_ids", "must not be empty; None allows every token")
        object.__setattr__(self, "structured_outputs", StructuredOutputsParams.of(self.structured_outputs))
        if self.structured_outputs is not None:
            for name in ("ignore_eos", "allowed_token_ids"):
                if getattr(self, name):
                    raise InvalidRequestError(name, "cannot be combined with structured_outputs")
        object.__setattr__(self, "stop_strings", _as_stop_strings(self.stop))
        if self.stop_strings and not self.detokenize:
            raise InvalidRequestError("stop", "stop strings need detokenize=True")
        if self.is_greedy and self.n > 1 and not self.use_beam_search:
            raise InvalidRequestError(
                "n", f"must be 1 with greedy sampling, where all sequences would be equal; got {self.n}"
            )
        self._check_beam_search()

    def _check_beam_search(self) -> None:
        _check_number("length_penalty", self.length_penalty, low=-10.0, high=10.0)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidRequestError(
                "early_stopping", f"must be True, False or 'never', got {_short(self.early_stopping)}"
            )
        if not self.use_beam_search:
            return
        if self.stop_strings:
            raise InvalidRequestError("stop", "stop strings are not supported with beam search")
        if self.logprobs is not None:
            raise InvalidRequestError(
                "logprobs", "not supported with beam search; cumulative_logprob holds the sum of each sequence"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether sampling is greedy (always the most likely token)."""
        return self.temperature < GREEDY_TEMPERATURE

    def check_token_ids(self, vocab_size: int) -> None:
        """Raise InvalidRequestError for a stop, bias or allowed id that is not in the vocabulary."""
        check_token_ids("stop_token_ids", self.stop_token_ids or (), vocab_size)
        check_token_ids("logit_bias", self.logit_bias or (), vocab_size)
        _check_count("allowed_token_ids", self.allowed_token_ids or (), vocab_size)
        check_token_ids("allowed_token_ids", self.allowed_token_ids or (), vocab_size)


def check_token_ids(field_name: str, token_ids: Iterable[Any], vocab_size: int) -> None:
    """Raise InvalidRequestError unless every id is an integer in [0, vocab_size)."""
    for token_id in token_ids:
        if type(token_id) is int and 0 <= token_id < vocab_size:  # a fortieth of the time that a protocol takes
            continue
        if isinstance(token_id, bool) or not isinstance(token_id, SupportsIndex):
            raise InvalidRequestError(field_name, f"token ids must be integers, got {_short(token_id)}")
        if not 0 <= operator.index(token_id) < vocab_size:
            raise InvalidRequestError(field_name, f"token id {token_id} is outside the vocabulary [0, {vocab_size})")


def _as_stop_strings(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or not all(isinstance(s, str) for s in strings):
        raise InvalidRequestError("stop", f"must be a string or a list of strings, got {_short(stop)}")
    _check_count("stop", strings, MAX_STOP_STRINGS)
    if any(len(s) > MAX_STOP_CHARS for s in strings):
        longest = max(map(len, strings))
        raise InvalidRequestError("stop", f"a stop string may have {MAX_STOP_CHARS} characters, got {longest}")
    if any(not s for s in strings):
        raise InvalidRequestError("stop", "an empty stop string would end every text at once")
    return tuple(strings)


def _check_count(name: str, values: Collection[Any], most: int) -> None:
    if len(values) > most:
        raise InvalidRequestError(name, f"must have at most {most} entries, got {len(values)}")


def _short(value: object) -> str:
    """A value as an error message quotes it."""
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "…"


def _check_number(
    name: str, value: Any, low: float = -math.inf, high: float = math.inf, open_low: bool = False
) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise InvalidRequestError(name, f"must be a finite number, got {_short(value)}")
    value = float(value)
    if value < low or value > high or (open_low and value == low):
        if high == math.inf:
            wanted = f"{'greater than' if open_low else 'at least'} {low:g}"
        else:
            wanted = f"in {'(' if open_low else '['}{low:g}, {high:g}]"
        raise InvalidRequestError(name, f"must be {wanted}, got {value:g}")


def _check_int(name: str, value: Any, low: int, high: int | None = None, hint: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise InvalidRequestError(name, f"must be an integer, got {_short(value)}")
    value = operator.index(value)
    if value < low or (high is not None and value > high):
        wanted = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidRequestError(name, f"must be {wanted}, got {value}" + (f" ({hint})" if hint else ""))
