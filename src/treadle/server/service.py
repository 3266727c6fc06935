"""What the endpoints share: the engine, and the way from a request's prompts to its outputs."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request as HTTPRequest

from treadle.build import BuiltEngine
from treadle.engine.async_engine import AsyncEngine, RequestStream
from treadle.errors import EngineError, InvalidRequestError
from treadle.outputs import RequestOutput
from treadle.sampling_params import SamplingParams
from treadle.text.input_processor import Prompt, RequestOptions

MAX_PROMPTS = 1024
"""Prompts of one HTTP request."""

DISCONNECT_POLL_S = 0.2


class ClientGone(Exception):  # noqa: N818 - nobody is left to be told of an error
    """The client closed the connection before its answer was ready."""


class ModelNotFound(Exception):  # noqa: N818 - named as OpenAI names it
    """The request names a model that is not served here."""


class Service:
    """An engine as the endpoints see it.

    Args:
        built: the engine and what belongs to it.
        model_name: what clients call the model.
    """

    def __init__(self, built: BuiltEngine, model_name: str) -> None:
        self.built = built
        self.model_name = model_name
        self.engine = AsyncEngine(built.engine)
        self.created = int(time.time())
        self.is_stopping = False

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """Sampling parameters that the model asks for."""
        return dict(self.built.sampling_defaults)

    def check_model(self, name: str | None) -> None:
        """ModelNotFound unless `name` is the served model, or nothing was said."""
        if name is not None and name != self.model_name:
            raise ModelNotFound(f"the model {name!r} does not exist here; {self.model_name!r} is served")

    def new_id(self, kind: str, wanted: str | None) -> str:
        """A name for a request: the client's own, or a new one."""
        if wanted is not None and not 0 < len(wanted) <= 200:
            raise InvalidRequestError("request_id", "must have 1 to 200 characters")
        return f"{kind}-{wanted or uuid.uuid4().hex}"

    async def start(
        self,
        request_id: str,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        options: RequestOptions,
        *,
        stream: bool,
        add_special_tokens: bool,
        max_tokens: int | None,
    ) -> list[RequestStream]:
        """Queue one request per prompt; all of them or none.

        Args:
            request_id: of the call; several prompts get numbers after it.
            prompts, params, options: what is asked for.
            stream: an output per token, rather than one at the end.
            add_special_tokens: whether texts get what the model puts around a text.
            max_tokens: what the client asked for, which has to fit; None if it named no number.
        """
        if not 1 <= len(prompts) <= MAX_PROMPTS:
            raise InvalidRequestError("prompt", f"there must be 1 to {MAX_PROMPTS} prompts, got {len(prompts)}")
        if self.is_stopping:
            raise EngineError("the server is shutting down")
        ids = [request_id if len(prompts) == 1 else f"{request_id}-{i}" for i in range(len(prompts))]
        # Tokenizing a long text takes a while, and holds no lock.
        requests = await asyncio.to_thread(
            lambda: self.built.input_processor.make_requests(
                ids,
                prompts,
                [params] * len(prompts),
                [options] * len(prompts),
                arrival_time=self.built.engine.clock.now(),
                add_special_tokens=add_special_tokens,
            )
        )
        max_model_len = self.built.limits.max_model_len
        for request in requests:
            num_prompt_tokens = len(request.prompt_token_ids)
            if max_tokens is not None and num_prompt_tokens + max_tokens > max_model_len:
                raise InvalidRequestError(
                    "max_tokens",
                    f"{max_tokens} after a prompt of {num_prompt_tokens} tokens is more than the model's length of "
                    f"{max_model_len}; at most {max_model_len - num_prompt_tokens} fit",
                )
        return await self.engine.add(requests, stream=stream)

    async def finish(self, streams: Sequence[RequestStream], http: HTTPRequest) -> list[RequestOutput]:
        """The last output of each request; ClientGone, with all of them aborted, if the client leaves before."""
        answers = asyncio.gather(*(stream.last() for stream in streams))
        try:
            while True:
                done, _ = await asyncio.wait([answers], timeout=DISCONNECT_POLL_S)
                if done:
                    break
                if await http.is_disconnected():
                    raise ClientGone
        except BaseException:
            answers.cancel()
            await asyncio.gather(answers, return_exceptions=True)
            for stream in streams:
                self.engine.abort(stream.request_id)
            raise
        outputs = await answers
        for output in outputs:
            if output.error is not None:
                raise EngineError(output.error)
        return outputs


async def interleave(streams: Sequence[RequestStream]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Outputs of several streams as they come, each with its stream's number."""
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(maxsize=len(streams))

    async def pump(number: int) -> None:
        try:
            async for output in streams[number]:
                await queue.put((number, output))
            await queue.put((number, None))
        except Exception as error:
            await queue.put((number, error))

    tasks = [asyncio.create_task(pump(number)) for number in range(len(streams))]
    try:
        num_open = len(streams)
        while num_open:
            number, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
