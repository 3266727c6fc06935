"""Results of requests. Shapes and names are those of vLLM's RequestOutput."""

from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of one token at one position.

    Attributes:
        logprob: natural logarithm of the model's probability, before penalties and temperature.
        rank: 1 for the most likely token of the vocabulary at that position.
        decoded_token: the token's text: empty for a part of a character, the whole character for the token that
            completes it. None when the request does not detokenize.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]
"""Token id → its log-probability, for one position."""


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence, or the new part of it when streaming.

    Attributes:
        index: which sequence of the request.
        text: the generated text (streaming: the part that is new since the last output).
        token_ids: the generated token ids (streaming: the new ones).
        cumulative_logprob: sum of the sampled tokens' log-probabilities; None unless `logprobs` was requested.
        logprobs: one mapping per token of `token_ids`; None unless requested.
        finish_reason: "stop", "length", "abort" or "error"; None while the sequence runs.
        stop_reason: the stop string or stop token id that ended it; None for an end-of-sequence token.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether this sequence has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class PreemptionRecord:
    """One preemption of a request.

    Attributes:
        step: number of the step.
        mode: "recompute" or "swap".
        for_request_id: the request that needed the blocks; the preempted request itself if none ranked behind it.
    """

    step: int
    mode: str
    for_request_id: str


@dataclass(slots=True)
class RequestMetrics:
    """Times and counts of a request; times are seconds on the engine's clock.

    Attributes:
        arrival_time: when the request was added.
        first_scheduled_time: when a step first ran part of it.
        first_token_time: when its first token was sampled.
        last_token_time: when its last token was sampled; set when one of its sequences ends.
        finished_time: when it ended.
        preemptions: every preemption, in order.
        num_cached_tokens: prompt tokens taken from the prefix cache at its first admission.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    preemptions: list[PreemptionRecord] = field(default_factory=list)
    num_cached_tokens: int = 0

    @property
    def num_preemptions(self) -> int:
        """How often the request was preempted."""
        return len(self.preemptions)

    @property
    def time_in_queue(self) -> float | None:
        """Seconds between arrival and the first step that ran part of it."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds between arrival and the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """The output of one request.

    Attributes:
        request_id: the request's id in the engine.
        prompt: the prompt's text; None when token ids were given.
        prompt_token_ids: the prompt's token ids; all outputs of a request share the list.
        prompt_logprobs: one mapping per prompt token, None for the first; None unless requested.
        outputs: the generated sequences.
        finished: whether the whole request has ended.
        metrics: times and counts of the request.
        error: the error message if an output's finish_reason is "error".
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    error: str | None = None

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens taken from the prefix cache."""
        return self.metrics.num_cached_tokens


def merge_deltas(outputs: list[RequestOutput]) -> RequestOutput:
    """Merge consecutive outputs of one streaming request into one."""
    merged: dict[int, CompletionOutput] = {}
    for output in outputs:
        for new in output.outputs:
            old = merged.get(new.index)
            if old is None:
                merged[new.index] = replace(new, token_ids=list(new.token_ids))
                continue
            old.text += new.text
            old.token_ids += new.token_ids
            if new.logprobs is not None:
                old.logprobs = (old.logprobs or []) + new.logprobs
            old.cumulative_logprob = new.cumulative_logprob
            old.finish_reason, old.stop_reason = new.finish_reason, new.stop_reason
    return replace(outputs[-1], outputs=[merged[index] for index in sorted(merged)])
