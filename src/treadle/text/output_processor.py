"""From the tokens of a step to answers: text, stop strings, log-probabilities.

A request that nobody watches (no streaming, no stop strings, no logprobs) costs nothing here until it ends;
its text is decoded once.
"""

from collections.abc import Iterable

from treadle.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from treadle.request import FinishReason, Request, Sequence
from treadle.scheduler import StepOutputs, TokenLogprobs
from treadle.text.detokenizer import IncrementalDetokenizer
from treadle.text.stop_strings import StopStringMatcher
from treadle.text.tokenizer import Tokenizer


class OutputProcessor:
    """Turns tokens into RequestOutputs.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._states: dict[str, _RequestState] = {}

    def add(self, request: Request, *, stream: bool) -> None:
        """Start to follow `request`; with `stream`, every token gives an output of what is new."""
        self._states[request.request_id] = _RequestState(request, self._tokenizer, stream)

    def process(self, outputs: StepOutputs) -> list[tuple[str, str]]:
        """Take a step's tokens; returns (request id, stop string) for requests that have met one."""
        for request, position, entries in outputs.prompt_logprobs:
            self._states[request.request_id].take_prompt_logprobs(position, entries)
        stopped = []
        for seq, token_id in zip(outputs.sequences, outputs.token_ids.tolist(), strict=True):
            state = self._states[seq.request.request_id]
            if state.watched:
                state.take_token(seq, token_id, outputs.logprobs.get(seq))
                if state.stop_string is not None:
                    stopped.append((seq.request.request_id, state.stop_string))
        return stopped

    def collect(self, finished: Iterable[Request]) -> list[RequestOutput]:
        """The outputs that are due: what is new for streaming requests, and the answers of ended ones."""
        results = []
        ended = {request.request_id for request in finished}
        for request_id in ended:
            results.append(self._states.pop(request_id).final_output())
        if any(state.stream for state in self._states.values()):
            results += [s.delta() for s in self._states.values() if s.stream and s.new_token_ids]
        return results


class _RequestState:
    """What the processor knows about one request.

    Attributes:
        stream: whether every token gives an output.
        watched: whether tokens have to be looked at one by one.
        new_token_ids: tokens since the last output.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, stream: bool) -> None:
        params = request.sampling_params
        self.request = request
        self.stream = stream
        self.watched = stream or bool(params.stop_strings) or params.logprobs is not None
        self.new_token_ids: list[int] = []
        self._tokenizer = tokenizer
        self._params = params
        self._num_tokens = 0
        self._texts: list[str] = []
        self._logprobs: list[PositionLogprobs] | None = None if params.logprobs is None else []
        self._cumulative_logprob = 0.0
        self._prompt_logprobs: list[PositionLogprobs | None] | None = None
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = [None]
        self._detokenizer: IncrementalDetokenizer | None = None
        if params.detokenize and (stream or params.stop_strings):
            self._detokenizer = IncrementalDetokenizer(
                tokenizer, skip_special_tokens=params.skip_special_tokens
            )
        self._matcher: StopStringMatcher | None = None
        if params.stop_strings:
            self._matcher = StopStringMatcher(
                params.stop_strings, include_in_output=params.include_stop_str_in_output
            )

    @property
    def stop_string(self) -> str | None:
        """The stop string that was met."""
        return None if self._matcher is None else self._matcher.found

    def take_token(self, seq: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Take a new token of the sequence."""
        self._num_tokens += 1
        self.new_token_ids.append(token_id)
        if self._logprobs is not None and logprobs is not None:
            self._logprobs.append(self._position(logprobs))
            self._cumulative_logprob += logprobs.logprob
        if self._detokenizer is not None and not self._hides_stop_token(seq):
            self._take_text(self._detokenizer.push((token_id,)))

    def take_prompt_logprobs(self, position: int, entries: Iterable[TokenLogprobs]) -> None:
        """Take log-probabilities of the prompt's tokens from `position` on; a recompute repeats some."""
        assert self._prompt_logprobs is not None
        for i, entry in enumerate(entries, start=position):
            if i == len(self._prompt_logprobs):
                self._prompt_logprobs.append(self._position(entry))

    def delta(self) -> RequestOutput:
        """What is new since the last output."""
        text = "".join(self._texts)
        self._texts.clear()
        return self._output(text, None, None)

    def final_output(self) -> RequestOutput:
        """The last output: the whole answer, or the rest of it when streaming."""
        (seq,) = self.request.sequences
        reason, stop_reason = seq.finish_reason, seq.stop_reason
        if self._detokenizer is not None:
            if self.stop_string is None:
                self._take_text(self._detokenizer.flush())
            if self.stop_string is not None:
                reason, stop_reason = FinishReason.STOP, self.stop_string
            elif self._matcher is not None:
                self._texts.append(self._matcher.flush())
            text = "".join(self._texts)
        elif self._params.detokenize:
            token_ids = seq.output_token_ids
            if self._hides_stop_token(seq):
                token_ids.pop()
            text = self._tokenizer.decode(token_ids, skip_special_tokens=self._params.skip_special_tokens)
        else:
            text = ""
        if not self.stream:
            self.new_token_ids = seq.output_token_ids
        return self._output(text, reason, stop_reason)

    def _take_text(self, text: str) -> None:
        if self._matcher is not None:
            if self._matcher.found is not None:
                return
            text = self._matcher.push(text, may_stop=self._num_tokens > self._params.min_tokens)
        if text:
            self._texts.append(text)

    def _hides_stop_token(self, seq: Sequence) -> bool:
        """Whether the sequence has just ended by a stop token, which is not part of the text."""
        return (
            seq.finish_reason is FinishReason.STOP
            and self.stop_string is None
            and not self._params.include_stop_str_in_output
        )

    def _output(self, text: str, reason: FinishReason | None, stop_reason: int | str | None) -> RequestOutput:
        token_ids, self.new_token_ids = self.new_token_ids, []
        logprobs = self._logprobs
        if self.stream and logprobs is not None:
            self._logprobs = []
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=self.request.prompt_token_ids.tolist(),
            prompt_logprobs=self._prompt_logprobs,
            outputs=[
                CompletionOutput(
                    index=0,
                    text=text,
                    token_ids=token_ids,
                    cumulative_logprob=None if logprobs is None else self._cumulative_logprob,
                    logprobs=logprobs,
                    finish_reason=None if reason is None else reason.value,
                    stop_reason=stop_reason,
                )
            ],
            finished=reason is not None,
            metrics=self.request.metrics,
            error=self.request.error,
        )

    def _position(self, entry: TokenLogprobs) -> PositionLogprobs:
        """The mapping that callers see: the token itself first, then the most likely ones."""
        position = {entry.token_id: Logprob(entry.logprob, entry.rank, self._token_text(entry.token_id))}
        top = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
        for rank, (token_id, logprob) in enumerate(top, start=1):
            position.setdefault(token_id, Logprob(logprob, rank, self._token_text(token_id)))
        return position

    def _token_text(self, token_id: int) -> str | None:
        if not self._params.detokenize:
            return None
        return self._tokenizer.decode((token_id,), skip_special_tokens=False)
