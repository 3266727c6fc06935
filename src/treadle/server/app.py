"""The FastAPI application: endpoints, and errors in OpenAI's shape."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from treadle._version import __version__
from treadle.assembly.build import BuiltEngine
from treadle.core.errors import EngineError, InvalidRequestError, Overloaded
from treadle.core.sampling_params import check_token_ids
from treadle.page import CONTENT_SECURITY_POLICY, CONTENT_TYPES, static_files
from treadle.server.body_errors import body_error
from treadle.server.chat import Chat, render_chat
from treadle.server.completions import Completion
from treadle.server.feed import StepFeed
from treadle.server.metrics import Metrics
from treadle.server.middleware import CheckBody, CheckHost, RequireKey
from treadle.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, ErrorResponse, TokenizeRequest
from treadle.server.responses import JSON, error_body, sse
from treadle.server.service import ClientGone, ModelNotFound, Service

logger = logging.getLogger("treadle")

RETRY_AFTER_S = 1

_SAFE_IN_HEADERS = "".join(map(chr, range(32, 127)))

MIN_TOKENIZED_CHARS = 2**16
TOKENIZED_CHARS_PER_TOKEN = 8
"""/tokenize takes this many characters for each token of the model's length, and at least the other."""
MAX_DETOKENIZED = 2**17

ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {
        "model": ErrorResponse,
        "description": "The request is invalid; the message names the field, the value and the limit.",
    },
    "5XX": {"model": ErrorResponse, "description": "The server is overloaded or stopping, or a step failed."},
}
EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {"text/event-stream": {}},
        "description": "The response; with stream=true, as server-sent events.",
    }
}


def create_app(
    built: BuiltEngine,
    *,
    model_name: str,
    api_key: str | None = None,
    max_body_bytes: int = 8 * 2**20,
    allowed_hosts: Sequence[str] = ("*",),
    allowed_origins: Sequence[str] = (),
) -> FastAPI:
    """Create the application; it starts and stops the engine.

    Args:
        built: the engine and its parts.
        model_name: name of the model in the API.
        api_key: key that clients must send; None for no authentication.
        max_body_bytes: maximum size of a request body.
        allowed_hosts: names that a Host header may hold; "*" for any, "*.example.com" for all below example.com.
        allowed_origins: origins of web pages that may read answers (CORS); "*" for any, none by default.
    """
    service = Service(built, model_name)
    engine, cache_config = built.engine, built.cache_config
    metrics = Metrics(engine.stats, cache_config, model_name)
    feed = StepFeed(engine.snapshot, cache_config.num_blocks, engine.clock, service.engine)
    engine.add_observer(metrics)
    engine.add_observer(feed)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        yield
        await service.shut_down()

    app = FastAPI(title="Treadle", version=__version__, lifespan=lifespan, responses=ERRORS)
    app.state.service = service
    app.add_middleware(CheckBody, max_bytes=max_body_bytes)
    if api_key is not None:
        app.add_middleware(RequireKey, key=api_key)
    if allowed_origins:  # before the key: a browser asks without it whether it may send one
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    app.add_middleware(CheckHost, allowed=allowed_hosts)
    _add_error_handlers(app)
    _add_generation(app, service)
    _add_text(app, service)
    _add_status(app, service, metrics)
    _add_scheduler(app, service, feed)
    _add_page(app)
    return app


def _add_generation(app: FastAPI, service: Service) -> None:
    async def respond(call: Chat | Completion, request: ChatRequest | CompletionRequest, http: Request) -> Response:
        try:
            streams = await call.start()
        except InvalidRequestError as error:
            raise request.with_its_field(error) from None
        headers = {"x-request-id": quote(call.id, safe=_SAFE_IN_HEADERS)}
        if not request.stream:
            return JSONResponse(await call.answer(streams, http), headers=headers)
        return StreamingResponse(_tell_errors(call.stream(streams)), headers=headers, media_type="text/event-stream")

    @app.post("/v1/chat/completions", responses=EVENTS)
    async def chat_completions(request: ChatRequest, http: Request) -> Response:
        return await respond(Chat(service, request), request, http)

    @app.post("/v1/completions", responses=EVENTS)
    async def completions(request: CompletionRequest, http: Request) -> Response:
        return await respond(Completion(service, request), request, http)


async def _tell_errors(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Report errors as an event, because a stream that has started cannot change its HTTP status."""
    try:
        async for event in events:
            yield event
    except EngineError as error:
        yield sse(error_body(str(error), "server_error", code=500))
        yield sse("[DONE]")


def _add_text(app: FastAPI, service: Service) -> None:
    tokenizer = service.tokenizer
    one_at_a_time = asyncio.Lock()

    @app.post("/tokenize")
    async def tokenize(request: TokenizeRequest) -> JSON:
        service.check_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequestError("prompt", "give exactly one of 'prompt' and 'messages'")
        add_special_tokens = request.add_special_tokens
        text = request.prompt
        if text is None:
            assert request.messages is not None
            chat = ChatRequest(messages=request.messages, add_generation_prompt=request.add_generation_prompt)
            text, add_special_tokens = await render_chat(service, chat), False
        most = max(MIN_TOKENIZED_CHARS, TOKENIZED_CHARS_PER_TOKEN * service.limits.max_model_len)
        if len(text) > most:
            raise InvalidRequestError("prompt", f"must have at most {most} characters, got {len(text)}")

        def work() -> JSON:
            ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
            body: JSON = {"count": len(ids), "max_model_len": service.limits.max_model_len, "tokens": ids}
            if request.return_token_strs:
                body["token_strs"] = [tokenizer.token_text(token_id) for token_id in ids]
            return body

        async with one_at_a_time:  # the threads are those of others too
            return await asyncio.to_thread(work)

    @app.post("/detokenize")
    async def detokenize(request: DetokenizeRequest) -> JSON:
        service.check_model(request.model)
        if len(request.tokens) > MAX_DETOKENIZED:
            raise InvalidRequestError("tokens", f"must have at most {MAX_DETOKENIZED} ids, got {len(request.tokens)}")
        check_token_ids("tokens", request.tokens, service.limits.vocab_size)
        return {"prompt": await asyncio.to_thread(tokenizer.decode, request.tokens, skip_special_tokens=False)}

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> JSON:
        return {
            "tokenizer_class": type(tokenizer).__name__,
            "bos_token": tokenizer.bos_token,
            "eos_token": tokenizer.eos_token,
            "chat_template": service.chat_template,
            "max_model_len": service.limits.max_model_len,
        }


def _add_status(app: FastAPI, service: Service, metrics: Metrics) -> None:
    entry: JSON = {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "treadle",
        "max_model_len": service.limits.max_model_len,
    }

    @app.get("/v1/models")
    async def models() -> JSON:
        return {"object": "list", "data": [entry]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> JSON:
        service.check_model(name)
        return entry

    @app.get("/health", response_class=PlainTextResponse)
    async def health() -> Response:
        error = service.engine.error
        if error is None and not service.is_stopping:
            return PlainTextResponse()
        return PlainTextResponse(str(error or "shutting down"), status_code=503)

    @app.get("/version")
    async def version() -> JSON:
        return {"version": __version__}

    @app.get("/load")
    async def load() -> JSON:
        return {"server_load": service.engine.num_unfinished_requests}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def prometheus() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _add_scheduler(app: FastAPI, service: Service, feed: StepFeed) -> None:
    @app.get("/scheduler/state")
    async def state() -> JSON:
        return await service.scheduler_state()

    @app.get("/scheduler/steps", responses=EVENTS)
    async def steps() -> Response:
        if service.engine.error is not None:
            raise service.engine.error

        async def events() -> AsyncIterator[bytes]:
            async for record in feed.follow(lambda: service.is_stopping or service.engine.error is not None):
                yield b": nothing new\n\n" if record is None else sse(record)

        return StreamingResponse(events(), media_type="text/event-stream")


def _add_page(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    @app.get("/page/{path:path}", include_in_schema=False)
    async def page(path: str = "index.html") -> Response:
        text = static_files().get(path)
        if text is None:
            raise HTTPException(404, f"there is no /page/{path}")
        headers = {"Content-Security-Policy": CONTENT_SECURITY_POLICY, "Cache-Control": "no-cache"}
        return Response(text, media_type=CONTENT_TYPES[path.rpartition(".")[2]], headers=headers)


def _add_error_handlers(app: FastAPI) -> None:
    def answer(
        status: int, kind: str, message: str, param: str | None = None, code: str | None = None, **headers: str
    ) -> Response:
        body = error_body(message, kind, param, code or status)
        return JSONResponse(body, status_code=status, headers=headers or None)

    async def invalid(_: Request, error: InvalidRequestError) -> Response:
        return answer(400, "invalid_request_error", str(error), error.field, error.code)

    async def malformed(http: Request, error: RequestValidationError) -> Response:
        errors = error.errors()
        if errors[0]["type"] == "json_invalid":  # its place is a number of characters, not a field
            cause, where = errors[0]["ctx"]["error"], errors[0]["loc"][-1]
            return answer(400, "invalid_request_error", f"the body is not valid JSON: {cause} at character {where}")
        found = body_error(errors, error.body)
        if found.field:
            return await invalid(http, found)
        if error.body:  # FastAPI parses a body only with this header
            problem = "must be a JSON object, sent with the header 'content-type: application/json'"
        else:
            problem = "is missing; it must be a JSON object"
        return answer(400, "invalid_request_error", f"the body {problem}")

    async def overloaded(_: Request, error: Overloaded) -> Response:
        return answer(503, "overloaded_error", str(error), **{"Retry-After": str(RETRY_AFTER_S)})

    async def no_model(_: Request, error: ModelNotFound) -> Response:
        return answer(404, "not_found_error", str(error), "model")

    async def failed(http: Request, error: EngineError) -> Response:
        service: Service = http.app.state.service
        is_dead = service.engine.error is not None or service.is_stopping
        return answer(503 if is_dead else 500, "server_error", str(error))

    async def gone(_: Request, error: ClientGone) -> Response:
        return Response(status_code=499)

    async def plain(_: Request, error: HTTPException) -> Response:
        return answer(error.status_code, "invalid_request_error", str(error.detail))

    async def unexpected(_: Request, error: Exception) -> Response:
        logger.exception("a request failed", exc_info=error)
        return answer(500, "server_error", "internal error; see the server's log")

    handlers: dict[type[Exception], Any] = {
        InvalidRequestError: invalid,
        RequestValidationError: malformed,
        Overloaded: overloaded,
        ModelNotFound: no_model,
        EngineError: failed,
        ClientGone: gone,
        HTTPException: plain,
        Exception: unexpected,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
