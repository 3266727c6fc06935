"""The common part of a call of a generating endpoint, chat or completion."""

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Generic, TypeVar

from treadle.core.errors import EngineError
from treadle.core.outputs import CompletionOutput
from treadle.engine.async_engine import RequestStream
from treadle.server.protocol import GenerationRequest
from treadle.server.responses import JSON, finish_fields, sse, usage
from treadle.server.service import Service, interleave
from treadle.text.token_texts import TokenTexts

R = TypeVar("R", bound=GenerationRequest)


class Call(ABC, Generic[R]):
    """One call: its request, and the frame of its response.

    Args:
        service: the engine.
        request: the request body.
        id_prefix: prefix of the call's id.

    Attributes:
        id: the id of the call, in its response and in the header x-request-id.
    """

    chunk_kind: str
    """The `object` field of streamed chunks."""

    def __init__(self, service: Service, request: R, id_prefix: str) -> None:
        service.check_model(request.model)
        self._service = service
        self._request = request
        self._created = int(time.time())
        self._texts: dict[int, TokenTexts] = {}
        self.id = service.new_id(id_prefix, request.request_id)

    async def stream(self, streams: Sequence[RequestStream]) -> AsyncIterator[bytes]:
        """The response as server-sent events: a chunk per token and choice, then the usage if requested."""
        options = self._request.stream_options
        # Per prompt: prompt tokens, generated tokens, tokens from the prefix cache.
        used: dict[int, tuple[int, int, int]] = {}
        begun: set[int] = set()

        def chunk(number: int, choice: JSON) -> bytes:
            body = self._body(self.chunk_kind, [choice])
            if options is not None and options.continuous_usage_stats:
                body["usage"] = usage(*used[number])
            return sse(body)

        async for number, output in interleave(streams):
            if output.error is not None:
                raise EngineError(output.error)
            num_prompt_tokens, num_cached = len(output.prompt_token_ids), output.num_cached_tokens
            num_generated = used[number][1] if number in used else 0
            for completion in output.outputs:
                index = number * self._request.n + completion.index
                used[number] = (num_prompt_tokens, num_generated, num_cached)
                if index not in begun:
                    begun.add(index)
                    for choice in self._opening(index):
                        yield chunk(number, choice)
                num_generated += len(completion.token_ids)
                used[number] = (num_prompt_tokens, num_generated, num_cached)
                choice = {"index": index, **self._delta(index, completion), **finish_fields(completion)}
                if self._request.return_token_ids:
                    choice["token_ids"] = completion.token_ids
                yield chunk(number, choice)
        if options is not None and options.include_usage:
            totals = [sum(column) for column in zip(*used.values(), strict=True)]
            yield sse({**self._body(self.chunk_kind, []), "usage": usage(*totals)})
        yield sse("[DONE]")

    def _opening(self, index: int) -> Sequence[JSON]:
        """The choices to send before the first token of a choice."""
        return ()

    def _texts_of(self, index: int) -> TokenTexts:
        """What follows the text of a choice, for its log-probabilities."""
        if index not in self._texts:
            skips = self._request.skip_special_tokens
            self._texts[index] = TokenTexts(self._service.tokenizer, skip_special_tokens=skips)
        return self._texts[index]

    @abstractmethod
    def _delta(self, index: int, completion: CompletionOutput) -> JSON:
        """The new part of a choice, for one chunk."""

    def _body(self, kind: str, choices: Sequence[JSON]) -> JSON:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._service.model_name,
            "choices": list(choices),
        }
