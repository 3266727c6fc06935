"""Turns the tokens of a step into outputs: text, stop strings, log-probabilities.

A request without streaming, stop strings and logprobs costs nothing here until it ends; its text is decoded once.
"""

import logging
from collections.abc import Iterable
from functools import cached_property

from treadle.core.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from treadle.core.request import FinishReason, Request, Sequence
from treadle.scheduler import StepOutputs, TokenLogprobs
from treadle.text.detokenizer import IncrementalDetokenizer
from treadle.text.stop_strings import StopStringMatcher
from treadle.text.token_texts import TokenTexts
from treadle.text.tokenizer import Tokenizer

logger = logging.getLogger("treadle")


class OutputProcessor:
    """Turns tokens into RequestOutputs. A request whose tokens cannot be processed ends with an error, alone.

    Args:
        tokenizer: the model's tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[Request, _RequestState] = {}
        # Streams with tokens not yet in an output: a dict rather than a set, for its order.
        self._with_news: dict[Request, _RequestState] = {}
        self._failed: dict[Request, str] = {}

    def add(self, request: Request, *, stream: bool) -> None:
        """Track `request`; with `stream`, every token produces an output with the new part."""
        self._requests[request] = _RequestState(request, self._tokenizer, stream)

    def process(self, outputs: StepOutputs) -> list[tuple[Sequence, str]]:
        """Process a step's tokens; returns (sequence, stop string) for sequences that reached one."""
        for request, position, entries in outputs.prompt_logprobs:
            state = self._requests[request]
            try:
                state.take_prompt_logprobs(position, entries)
            except Exception as error:
                self._fail(state, error)
        stopped = []
        for i, (seq, token_id) in enumerate(zip(outputs.sequences, outputs.token_ids.tolist(), strict=True)):
            request = seq.request
            state = self._requests[request]
            if state.watched and state.error is None:
                if state.stream:
                    self._with_news[request] = state
                try:
                    completion = state.completion(seq)
                    completion.take_token(seq, token_id, outputs.logprobs.get(i))
                    if completion.stop_string is not None:
                        stopped.append((seq, completion.stop_string))
                except Exception as error:
                    self._fail(state, error)
        return stopped

    def take_failed(self) -> dict[Request, str]:
        """Requests whose tokens could not be processed since the last call, and why; they have to end."""
        failed, self._failed = self._failed, {}
        return failed

    def collect(self, finished: Iterable[Request]) -> list[RequestOutput]:
        """The outputs that are due: deltas of streaming requests, and final outputs of finished ones."""
        results = []
        for request in finished:
            self._with_news.pop(request, None)
            state = self._requests.pop(request)
            if state.error is None:
                try:
                    results.append(state.final_output())
                    continue
                except Exception as error:
                    self._fail(state, error)
            results.append(state.error_output())
        with_news, self._with_news = self._with_news, {}
        for state in with_news.values():
            try:
                results.append(state.delta())
                state.note_ended()
            except Exception as error:
                self._fail(state, error)
        return results

    def _fail(self, state: "_RequestState", error: Exception) -> None:
        request = state.request
        logger.error("the output of request %s cannot be processed", request.request_id, exc_info=error)
        state.error = f"EngineError: the output cannot be processed: {error!r}"
        self._with_news.pop(request, None)
        self._failed[request] = state.error


class _RequestState:
    """The processor's state of one request.

    Attributes:
        stream: whether every token produces an output.
        watched: whether tokens must be processed one by one.
        request: the request.
        error: why its tokens cannot be processed; None if they can.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, stream: bool) -> None:
        params = request.sampling_params
        self.stream = stream
        self.watched = stream or bool(params.stop_strings) or params.logprobs is not None
        self.request = request
        self.error: str | None = None
        self._tokenizer = tokenizer
        self._completions: dict[int, _CompletionState] = {}
        self._prompt_logprobs: list[PositionLogprobs | None] | None = None
        self._prompt_texts: TokenTexts | None = None
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = [None]
            if params.detokenize:
                self._prompt_texts = TokenTexts(tokenizer, skip_special_tokens=False)
                self._prompt_texts.push(int(request.prompt_token_ids[0]))

    @cached_property
    def _prompt_token_ids(self) -> list[int]:
        ids: list[int] = self.request.prompt_token_ids.tolist()
        return ids

    def completion(self, seq: Sequence) -> "_CompletionState":
        """The state of one of the request's sequences."""
        state = self._completions.get(seq.index)
        if state is None:
            state = _CompletionState(self.request, seq.index, self._tokenizer, self.stream)
            self._completions[seq.index] = state
        return state

    def take_prompt_logprobs(self, position: int, entries: Iterable[TokenLogprobs]) -> None:
        """Add log-probabilities of the prompt's tokens from `position` on; a recompute repeats some."""
        assert self._prompt_logprobs is not None
        for i, entry in enumerate(entries, start=position):
            if i == len(self._prompt_logprobs):
                self._prompt_logprobs.append(_position_logprobs(entry, self._prompt_texts))

    def delta(self) -> RequestOutput:
        """The new part since the last output. A finished sequence contributes its final part."""
        with_news = [c for c in self._completions.values() if c.new_token_ids]
        return self._output([c.delta() for c in with_news], finished=False)

    def note_ended(self) -> None:
        """The last delta was delivered: those of the sequences that have ended were their final parts."""
        for completion in self._completions.values():
            completion.has_ended = completion.is_finished

    def final_output(self) -> RequestOutput:
        """The final output: the whole answer, or the rest of it when streaming."""
        sequences = self.request.sequences
        if self.stream:  # the final parts of the others are already out
            sequences = [seq for seq in sequences if not self.completion(seq).has_ended]
        return self._output([self.completion(seq).final(seq) for seq in sequences], finished=True)

    def error_output(self) -> RequestOutput:
        """The final output of a request that has failed: the tokens (streaming: none), without text."""
        outputs = []
        for seq in self.request.sequences:
            completion = self._completions.get(seq.index)
            if completion is None or not completion.has_ended:
                token_ids = [] if self.stream else seq.output_token_ids
                outputs.append(CompletionOutput(seq.index, "", token_ids, finish_reason=FinishReason.ERROR.value))
        return self._output(outputs, finished=True)

    def _output(self, outputs: list[CompletionOutput], finished: bool) -> RequestOutput:
        request = self.request
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs,
            outputs=sorted(outputs, key=lambda output: output.index),
            finished=finished,
            metrics=request.metrics,
            error=request.error or self.error,
        )


class _CompletionState:
    """The processor's state of one sequence of a request.

    Attributes:
        new_token_ids: tokens since the last output.
        has_ended: whether its final part has been delivered.
    """

    def __init__(self, request: Request, index: int, tokenizer: Tokenizer, stream: bool) -> None:
        params = request.sampling_params
        self.new_token_ids: list[int] = []
        self.has_ended = False
        self._index = index
        self._stream = stream
        self._tokenizer = tokenizer
        self._params = params
        self._last: Sequence | None = None
        self._num_tokens = 0
        self._texts: list[str] = []
        self._logprobs: list[PositionLogprobs] | None = None if params.logprobs is None else []
        self._cumulative_logprob = 0.0
        self._token_texts: TokenTexts | None = None
        if self._logprobs is not None and params.detokenize:
            self._token_texts = TokenTexts(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._detokenizer: IncrementalDetokenizer | None = None
        if params.detokenize and (stream or params.stop_strings):
            self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._matcher: StopStringMatcher | None = None
        if params.stop_strings:
            self._matcher = StopStringMatcher(
                params.stop_strings, include_in_output=params.include_stop_str_in_output
            )

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found, or None."""
        return None if self._matcher is None else self._matcher.found

    @property
    def is_finished(self) -> bool:
        """Whether the sequence has ended."""
        return self._last is not None and self._last.is_finished

    def take_token(self, seq: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Process a new token of the sequence."""
        self._last = seq
        self._num_tokens += 1
        self.new_token_ids.append(token_id)
        if self._logprobs is not None and logprobs is not None:
            self._logprobs.append(_position_logprobs(logprobs, self._token_texts))
            self._cumulative_logprob += logprobs.logprob
        if self._detokenizer is not None and not self._hides_stop_token(seq, token_id):
            self._take_text(self._detokenizer.push((token_id,)))

    def delta(self) -> CompletionOutput:
        """The new part since the last output; the final part if the sequence has ended."""
        if self._last is not None and self._last.is_finished:
            return self.final(self._last)
        text = "".join(self._texts)
        self._texts.clear()
        return self._output(text, None, None)

    def final(self, seq: Sequence) -> CompletionOutput:
        """The whole output of a finished sequence, or the rest of it when streaming."""
        reason, stop_reason = seq.finish_reason, seq.stop_reason
        if self._params.use_beam_search:
            self._cumulative_logprob = seq.cumulative_logprob
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
            if token_ids and self._hides_stop_token(seq, token_ids[-1]):
                token_ids.pop()
            text = self._tokenizer.decode(token_ids, skip_special_tokens=self._params.skip_special_tokens)
        else:
            text = ""
        if not self._stream:
            self.new_token_ids = seq.output_token_ids
        return self._output(text, reason, stop_reason)

    def _take_text(self, text: str) -> None:
        if self._matcher is not None:
            if self._matcher.found is not None:
                return
            text = self._matcher.push(text, may_stop=self._num_tokens > self._params.min_tokens)
        if text:
            self._texts.append(text)

    def _hides_stop_token(self, seq: Sequence, token_id: int) -> bool:
        """Whether `token_id` ended the sequence and is therefore not part of the text."""
        return (
            seq.finish_reason is FinishReason.STOP
            and token_id in seq.request.stop_token_ids
            and self.stop_string is None
            and not self._params.include_stop_str_in_output
        )

    def _output(self, text: str, reason: FinishReason | None, stop_reason: int | str | None) -> CompletionOutput:
        token_ids, self.new_token_ids = self.new_token_ids, []
        logprobs = self._logprobs
        if self._stream and logprobs is not None:
            self._logprobs = []
        has_sum = logprobs is not None or self._params.use_beam_search
        return CompletionOutput(
            index=self._index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=self._cumulative_logprob if has_sum else None,
            logprobs=logprobs,
            finish_reason=None if reason is None else reason.value,
            stop_reason=stop_reason,
        )


def _position_logprobs(entry: TokenLogprobs, texts: TokenTexts | None) -> PositionLogprobs:
    """The mapping that callers see: the token itself first, then the most likely ones.

    Args:
        entry: the log-probabilities.
        texts: follows the sequence; takes the token. None for no texts.
    """
    top_texts = [None if texts is None else texts.text_of(token_id) for token_id in entry.top_token_ids]
    text = None if texts is None else texts.push(entry.token_id)
    position = {entry.token_id: Logprob(entry.logprob, entry.rank, text)}
    top = zip(entry.top_token_ids, entry.top_logprobs, top_texts, strict=True)
    for rank, (token_id, logprob, top_text) in enumerate(top, start=1):
        position.setdefault(token_id, Logprob(logprob, rank, top_text))
    return position
