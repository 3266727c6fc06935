"""Shared by the endpoints: the engine, and the path from prompts to outputs."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, TypeVar

from starlette.requests import Request as HTTPRequest

from treadle.assembly.build import BuiltEngine
from treadle.core.errors import EngineError, InvalidRequestError
from treadle.core.outputs import RequestOutput
from treadle.core.sampling_params import SamplingParams
from treadle.engine.async_engine import AsyncEngine, RequestStream
from treadle.text.input_processor import Prompt, RequestOptions
from treadle.trace.state_record import describe_state

T = TypeVar("T")

MAX_PROMPTS = 1024
"""Maximum number of prompts in one HTTP request."""

MAX_ID_CHARS = 200

MAX_SEQUENCES = 4096
"""Maximum number of answers of one HTTP request, over all its prompts."""

DISCONNECT_POLL_S = 0.2


class ClientGone(Exception):  # noqa: N818 - not an error: there is no client left to report it to
    """The client closed the connection before its answer was ready."""


class ModelNotFound(Exception):  # noqa: N818 - named as OpenAI names it
    """The request names a model that is not served here."""


class Service:
    """An engine as the endpoints see it.

    Args:
        built: the engine and what belongs to it.
        model_name: what clients call the model.

    Attributes:
        model_name: the same.
        engine: runs the steps.
        tokenizer: of the model.
        chat_template: as text; None if the model has none.
        render_chat: makes a prompt of a conversation (`BuiltEngine.render_chat`).
        limits: what a request may ask for.
        check_length: refuses a text by its number of characters.
        created: when the server started, seconds since 1970.
        is_stopping: whether it takes no requests any more.
    """

    def __init__(self, built: BuiltEngine, model_name: str) -> None:
        self._built = built
        self.model_name = model_name
        self.engine = AsyncEngine(built.engine)
        self.tokenizer = built.tokenizer
        self.chat_template = None if built.chat_template is None else built.chat_template.source
        self.render_chat = built.render_chat
        self.limits = built.limits
        self.check_length = built.input_processor.check_length
        self.created = int(time.time())
        self.is_stopping = False
        self._work: set[asyncio.Future[Any]] = set()

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """Sampling parameters that the model asks for."""
        return dict(self._built.sampling_defaults)

    async def scheduler_state(self) -> dict[str, Any]:
        """The queues and what runs, between two steps; EngineError if the engine is dead."""
        return await self.engine.call(lambda: describe_state(self._built.engine.snapshot()))

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFound unless `name` is the served model or None."""
        if name is not None and name != self.model_name:
            raise ModelNotFound(f"the model {name!r} does not exist; this server serves {self.model_name!r}")

    def new_id(self, kind: str, wanted: str | None) -> str:
        """The id of a request: the client's own, or a new one."""
        if wanted is not None and not (0 < len(wanted) <= MAX_ID_CHARS and wanted.isprintable()):
            raise InvalidRequestError("request_id", f"must have 1 to {MAX_ID_CHARS} printable characters")
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
            request_id: id of the call; with several prompts, each gets a numeric suffix.
            prompts, params, options: one request is made for each prompt.
            stream: produce an output per token instead of one at the end.
            add_special_tokens: whether to add the model's special tokens, such as BOS, to texts.
            max_tokens: the client's limit, which must fit the model's length; None if it set none.
        """
        if not 1 <= len(prompts) <= MAX_PROMPTS:
            raise InvalidRequestError("prompt", f"must hold 1 to {MAX_PROMPTS} prompts, got {len(prompts)}")
        if len(prompts) * params.n > MAX_SEQUENCES:
            raise InvalidRequestError(
                "n", f"with {len(prompts)} prompts must be at most {MAX_SEQUENCES // len(prompts)}, got {params.n}"
            )
        if self.is_stopping:
            raise EngineError("the server is shutting down")
        ids = [request_id if len(prompts) == 1 else f"{request_id}-{i}" for i in range(len(prompts))]
        # Held until the requests have it. Compiling may take seconds, and happens in no thread that others need.
        grammar = None
        if params.structured_outputs is not None:
            compiling = self._built.input_processor.grammars.submit(params.structured_outputs)
            grammar = await self.result_of(asyncio.wrap_future(compiling))
        # Tokenizing a long text takes a while and releases the GIL.
        requests = await self.result_of(
            asyncio.to_thread(
                lambda: self._built.input_processor.make_requests(
                    ids,
                    prompts,
                    [params] * len(prompts),
                    [options] * len(prompts),
                    arrival_time=self._built.engine.clock.now(),
                    add_special_tokens=add_special_tokens,
                )
            )
        )
        del grammar
        max_model_len = self.limits.max_model_len
        for request in requests:
            num_prompt_tokens = len(request.prompt_token_ids)
            if max_tokens is not None and num_prompt_tokens + max_tokens > max_model_len:
                raise InvalidRequestError(
                    "max_tokens",
                    f"this model's maximum context length is {max_model_len} tokens; {max_tokens} after a prompt of "
                    f"{num_prompt_tokens} exceed it, and at most {max_model_len - num_prompt_tokens} fit",
                    code="context_length_exceeded",
                )
        return await self.engine.add(requests, stream=stream)

    async def result_of(self, work: Awaitable[T]) -> T:
        """The result of work in another thread; EngineError if the server ends before it is there."""
        future = asyncio.ensure_future(work)
        self._work.add(future)
        try:
            return await future
        except asyncio.CancelledError:
            if not self.is_stopping:
                raise
            raise EngineError("the server is shutting down") from None
        finally:
            self._work.discard(future)

    async def shut_down(self) -> None:
        """End all requests with errors, those included that are still being prepared."""
        self.is_stopping = True
        await self.engine.shut_down()
        for future in list(self._work):
            future.cancel()

    async def finish(self, streams: Sequence[RequestStream], http: HTTPRequest) -> list[RequestOutput]:
        """The final output of each request.

        Raises:
            ClientGone: the client disconnected; all requests are aborted.
            EngineError: a request ended with an error.
        """
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
                self.engine.abort(stream)
            raise
        outputs = await answers
        for output in outputs:
            if output.error is not None:
                raise EngineError(output.error)
        return outputs


async def interleave(streams: Sequence[RequestStream]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Outputs of several streams as they arrive, each with its stream's number."""
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
