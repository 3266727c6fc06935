"""POST /v1/chat/completions."""

import asyncio
from collections.abc import Sequence

from starlette.requests import Request as HTTPRequest

from treadle.core.errors import InvalidRequestError
from treadle.core.outputs import CompletionOutput
from treadle.engine.async_engine import RequestStream
from treadle.server.call import Call
from treadle.server.protocol import ChatRequest, flatten_content
from treadle.server.responses import JSON, chat_logprobs, finish_fields, prompt_logprobs, usage_of
from treadle.server.service import Service
from treadle.text.chat_template import RenderedChat
from treadle.text.template_process import process


async def render_chat(service: Service, request: ChatRequest) -> RenderedChat:
    """The prompt that the model's chat template makes of the messages."""

    messages = flatten_content(request.messages)
    num_chars = sum(len(value) for message in messages for value in message.values() if isinstance(value, str))
    service.check_length("messages", num_chars)

    def render() -> RenderedChat:
        return service.render_chat(
            messages,
            add_generation_prompt=request.add_generation_prompt,
            variables=request.chat_template_kwargs,
        )

    return await service.result_of(asyncio.wrap_future(process.submit(render)))


class Chat(Call[ChatRequest]):
    """One call of the endpoint.

    Args:
        service: the engine.
        request: the request body.
    """

    chunk_kind = "chat.completion.chunk"

    def __init__(self, service: Service, request: ChatRequest) -> None:
        super().__init__(service, request, "chatcmpl")
        self._num_top = request.top_logprobs or 0
        if request.top_logprobs is not None and not request.logprobs:
            raise InvalidRequestError("top_logprobs", "requires logprobs=true")
        most = service.limits.max_logprobs
        if not 0 <= self._num_top <= most:
            raise InvalidRequestError("top_logprobs", f"must be between 0 and {most}, got {self._num_top}")

    async def start(self) -> list[RequestStream]:
        """Queue the conversation."""
        request = self._request
        params = request.sampling_params(
            self._service.sampling_defaults,
            max_tokens=request.token_limit,
            logprobs=self._num_top if request.logprobs else None,
            n=request.n,
        )
        text = await render_chat(self._service, request)
        prompt = (
            {"prompt": text} if request.cache_salt is None else {"prompt": text, "cache_salt": request.cache_salt}
        )
        return await self._service.start(
            self.id,
            [prompt],  # type: ignore[list-item]
            params,
            request.options(),
            stream=request.stream,
            add_special_tokens=False,
            max_tokens=request.token_limit,
        )

    async def answer(self, streams: Sequence[RequestStream], http: HTTPRequest) -> JSON:
        """The response body, without streaming."""
        (output,) = await self._service.finish(streams, http)
        choices = []
        for completion in output.outputs:
            choice = {
                "index": completion.index,
                "message": {"role": "assistant", "content": completion.text},
                "logprobs": self._logprobs(completion),
                **finish_fields(completion),
            }
            if self._request.return_token_ids:
                choice["token_ids"] = completion.token_ids
            choices.append(choice)
        body = {**self._body("chat.completion", choices), "usage": usage_of([output])}
        if self._request.return_token_ids:
            body["prompt_token_ids"] = output.prompt_token_ids
        if self._request.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(output)
        return body

    def _opening(self, index: int) -> list[JSON]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def _delta(self, index: int, completion: CompletionOutput) -> JSON:
        return {"delta": {"content": completion.text}, "logprobs": self._logprobs(completion)}

    def _logprobs(self, completion: CompletionOutput) -> JSON | None:
        if not self._request.logprobs or completion.logprobs is None:
            return None
        return chat_logprobs(completion.logprobs, self._num_top, self._texts_of(completion.index))
