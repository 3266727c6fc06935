"""POST /v1/completions."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request as HTTPRequest

from treadle.core.errors import InvalidRequestError
from treadle.core.outputs import CompletionOutput, RequestOutput
from treadle.engine.async_engine import RequestStream
from treadle.server.call import Call
from treadle.server.protocol import CompletionRequest
from treadle.server.responses import (
    JSON,
    completion_logprobs,
    finish_fields,
    prompt_logprobs,
    usage_of,
)
from treadle.server.service import Service
from treadle.text.input_processor import as_prompt_list
from treadle.text.token_texts import TokenTexts


class Completion(Call[CompletionRequest]):
    """One call of the endpoint.

    Args:
        service: the engine.
        request: the request body.
    """

    chunk_kind = "text_completion"

    def __init__(self, service: Service, request: CompletionRequest) -> None:
        super().__init__(service, request, "cmpl")
        self._num_generated = request.n
        if request.best_of is not None and request.best_of != request.n:
            if request.best_of < request.n:
                raise InvalidRequestError("best_of", f"must be at least n ({request.n}), got {request.best_of}")
            if request.stream:
                raise InvalidRequestError(
                    "best_of", "cannot be streamed: the best sequences are known only at the end"
                )
            self._num_generated = request.best_of
        # An echo without output: the engine generates one token, which is not returned.
        self._returns_output = not (request.echo and request.max_tokens == 0)

    async def start(self) -> list[RequestStream]:
        """Queue the prompts."""
        request = self._request
        if request.echo and request.stream:
            raise InvalidRequestError("echo", "cannot be streamed by this server")
        needs_logprobs = request.logprobs is not None or self._num_generated != request.n
        params = request.sampling_params(
            self._service.sampling_defaults,
            max_tokens=request.max_tokens if self._returns_output else 1,
            logprobs=(request.logprobs or 0) if needs_logprobs else None,
            n=self._num_generated,
        )
        if request.echo and request.logprobs is not None and request.prompt_logprobs is None:
            params = replace(params, prompt_logprobs=request.logprobs)
        prompts: list[Any] = list(as_prompt_list(request.prompt))
        if request.cache_salt is not None and prompts:
            key = "prompt" if isinstance(prompts[0], str) else "prompt_token_ids"
            prompts = [{key: prompt, "cache_salt": request.cache_salt} for prompt in prompts]
        return await self._service.start(
            self.id,
            prompts,
            params,
            request.options(),
            stream=request.stream,
            add_special_tokens=request.add_special_tokens,
            max_tokens=request.max_tokens if "max_tokens" in request.model_fields_set else None,
        )

    async def answer(self, streams: Sequence[RequestStream], http: HTTPRequest) -> JSON:
        """The response body, without streaming."""
        outputs = await self._service.finish(streams, http)
        choices = []
        for number, output in enumerate(outputs):
            best = output.outputs
            if len(best) > self._request.n:
                best = sorted(best, key=lambda c: -(c.cumulative_logprob or 0.0) / max(1, len(c.token_ids)))
                best = best[: self._request.n]
            for i, completion in enumerate(best):
                choices.append(self._choice(number * self._request.n + i, output, completion))
        body = self._body(self.chunk_kind, choices)
        body["usage"] = usage_of(outputs)
        if not self._returns_output:
            body["usage"]["completion_tokens"] = 0
            body["usage"]["total_tokens"] = body["usage"]["prompt_tokens"]
        return body

    def _delta(self, index: int, completion: CompletionOutput) -> JSON:
        return {"text": completion.text, "logprobs": self._logprobs(index, completion)}

    def _choice(self, index: int, output: RequestOutput, completion: CompletionOutput) -> JSON:
        request = self._request
        reported = (
            completion if self._returns_output else CompletionOutput(completion.index, "", [], 0.0, [], "length")
        )
        prompt = ""
        if request.echo:
            prompt = output.prompt if output.prompt is not None else self._decode(output.prompt_token_ids)
        logprobs = self._logprobs(index, reported, len(prompt))
        if logprobs is not None and request.echo:
            of_prompt = self._prompt_logprobs(prompt, output)
            logprobs = {name: of_prompt[name] + values for name, values in logprobs.items()}
        choice: JSON = {
            "index": index,
            "text": prompt + reported.text,
            "logprobs": logprobs,
            **finish_fields(reported),
        }
        if request.return_token_ids:
            choice["token_ids"] = reported.token_ids
            choice["prompt_token_ids"] = output.prompt_token_ids
        if request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output)
        return choice

    def _logprobs(self, index: int, completion: CompletionOutput, offset: int = 0) -> JSON | None:
        """The log-probabilities of the output of a choice, or of the next part of it."""
        request = self._request
        if request.logprobs is None or completion.logprobs is None:
            return None
        texts = self._texts_of(index)
        return completion_logprobs(completion.logprobs, completion.token_ids, request.logprobs, texts, offset)

    def _prompt_logprobs(self, prompt: str, output: RequestOutput) -> JSON:
        """The log-probabilities of an echoed prompt."""
        tokenizer, token_ids = self._service.tokenizer, output.prompt_token_ids
        positions = output.prompt_logprobs or []
        # A BOS token that the tokenizer has added precedes the client's text.
        is_special = token_ids[0] in tokenizer.special_token_ids
        num_added = int(is_special and not prompt.startswith(tokenizer.token_text(token_ids[0])))
        added, rest = (
            completion_logprobs(
                positions[part], token_ids[part], self._request.logprobs or 0,
                TokenTexts(tokenizer, skip_special_tokens=False),
            )
            for part in (slice(num_added), slice(num_added, None))
        )  # fmt: skip
        return {name: values + rest[name] for name, values in added.items()}

    def _decode(self, token_ids: list[int]) -> str:
        return self._service.tokenizer.decode(token_ids, skip_special_tokens=False)
