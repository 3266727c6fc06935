"""Request bodies: OpenAI's fields and vLLM's extensions.

Types are checked here; SamplingParams and the engine check values, and their errors name the field. Unsupported
fields that would change the answer are refused; unknown fields are ignored and logged.
"""

import logging
import re
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, model_validator

from treadle.core.errors import InvalidRequestError
from treadle.core.sampling_params import SamplingParams
from treadle.core.structured_outputs import StructuredOutputsParams
from treadle.text.input_processor import RequestOptions, check_name

logger = logging.getLogger("treadle")

MAX_N = 128
DEFAULT_COMPLETION_TOKENS = 16
MAX_SCHEMA_CHARS = 2**17
"""Maximum length of a schema, grammar or list of choices; llguidance limits their complexity."""


MAX_MESSAGES = 4096
MAX_UNKNOWN_FIELDS = 100

T = TypeVar("T")


class _FirstErrorOnly(FailFast):
    __hash__ = object.__hash__  # unions need it


Items = Annotated[list[T], _FirstErrorOnly()]
"""A list whose check ends at the first wrong item: a body may hold millions of them."""

Messages = Annotated[list[dict[str, Any]], _FirstErrorOnly(), Field(max_length=MAX_MESSAGES)]


class Body(BaseModel):
    """A request body, or part of one. Null stands for the default of every field that has another one.

    Types are strict, as in OpenAI's API: "16" and true are not numbers, 1 and "yes" are not booleans.
    """

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_the_default(cls, data: Any) -> Any:
        if not isinstance(data, dict) or None not in data.values():
            return data
        fields = cls.model_fields
        return {k: v for k, v in data.items() if v is not None or k not in fields or fields[k].is_required()}

    @model_validator(mode="before")  # the last one runs first
    @classmethod
    def _count_unknown_fields(cls, data: Any) -> Any:
        if isinstance(data, dict) and len(data) > MAX_UNKNOWN_FIELDS:
            unknown = [name for name in data if name not in cls.model_fields]
            if len(unknown) > MAX_UNKNOWN_FIELDS:
                raise InvalidRequestError(
                    unknown[0][:100],
                    f"is one of {len(unknown)} unknown fields; at most {MAX_UNKNOWN_FIELDS} are ignored",
                )
        return data


class StreamOptions(Body):
    """What a stream reports in addition to its deltas."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JSONSchemaFormat(Body):
    """A schema with the client's name for it."""

    name: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")


class ResponseFormat(Body):
    """OpenAI's field for JSON output."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchemaFormat | None = None

    def structured_outputs(self) -> dict[str, Any] | None:
        """The arguments for StructuredOutputsParams; None for plain text."""
        if self.type == "json_object":
            return {"json_object": True}
        if self.type == "text":
            return None
        if self.json_schema is None:
            raise InvalidRequestError("response_format.json_schema", "is required with type 'json_schema'")
        return {"json": self.json_schema.schema_}


class GenerationRequest(Body):
    """What /v1/completions and /v1/chat/completions have in common."""

    model_config = ConfigDict(extra="allow")

    # Fields that are accepted only with one of these values.
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "guided_json": (None,),
        "guided_regex": (None,),
        "guided_choice": (None,),
        "guided_grammar": (None,),
        "guided_whitespace_pattern": (None,),
        "bad_words": (None, []),
        "spaces_between_special_tokens": (None, True),
        "vllm_xargs": (None, {}),
        "lora_request": (None,),
        "prompt_embeds": (None,),
        "truncate_prompt_tokens": (None,),
        "logits_processors": (None, []),
    }

    model: str | None = None
    max_tokens: int | None = None
    response_format: ResponseFormat | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: str | Items[str] | None = None
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Annotated[dict[str, float], _FirstErrorOnly()] | None = None
    user: str | None = None
    # vLLM's.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Items[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    allowed_token_ids: Items[int] | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    prompt_logprobs: int | None = None
    priority: int = 0
    request_id: str | None = None
    cache_salt: str | None = None
    return_token_ids: bool = False
    structured_outputs: dict[str, Any] | None = None
    # Treadle's.
    tenant: str | None = None
    deadline_s: float | None = None

    @model_validator(mode="after")
    def _look_at_other_fields(self) -> "GenerationRequest":
        unknown = []
        for name, value in (self.model_extra or {}).items():
            if name not in self.unsupported:
                unknown.append(name)
            elif value not in self.unsupported[name]:
                raise InvalidRequestError(name, "is not supported by this server")
        if unknown:
            # As repr: a name may hold line breaks.
            logger.info("unknown request fields were ignored: %s", ", ".join(repr(n[:100]) for n in unknown[:20]))
        return self

    def options(self) -> RequestOptions:
        """The scheduling options of the request."""
        check_name("user", self.user or "")
        return RequestOptions(
            priority=self.priority, tenant=self.tenant or self.user or "", deadline_s=self.deadline_s
        )

    def sampling_params(
        self, defaults: dict[str, Any], *, max_tokens: int | None, logprobs: int | None, n: int
    ) -> SamplingParams:
        """The sampling parameters of the request.

        Args:
            defaults: the model's defaults, used where the request sets nothing.
            max_tokens: None for the rest of the model's length.
            logprobs: number of logprobs per token, None for none.
            n: number of sequences to generate.
        """
        if not 1 <= n <= MAX_N:
            raise InvalidRequestError("n", f"must be between 1 and {MAX_N}, got {n}")
        chosen = {
            name: value
            for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
            if (value := getattr(self, name)) is not None
        }
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError("prompt_logprobs", "cannot be streamed by this server")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options", "is only valid with stream=true")
        return SamplingParams(
            **{**defaults, **chosen},
            n=n,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
            seed=self.seed,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=_token_numbers(self.logit_bias),
            allowed_token_ids=self.allowed_token_ids,
            use_beam_search=self.use_beam_search,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            logprobs=logprobs,
            prompt_logprobs=self.prompt_logprobs,
            structured_outputs=self._structured_outputs(),
        )

    def with_its_field(self, error: InvalidRequestError) -> InvalidRequestError:
        """The error with the field that the client set, where the engine's has another name."""
        if self.structured_outputs is None and error.field.startswith("structured_outputs"):
            return InvalidRequestError("response_format", error.problem)
        return error

    def _structured_outputs(self) -> StructuredOutputsParams | None:
        wanted = None if self.response_format is None else self.response_format.structured_outputs()
        if wanted is not None and self.structured_outputs is not None:
            raise InvalidRequestError(
                "structured_outputs", "give at most one of structured_outputs and response_format"
            )
        params = StructuredOutputsParams.of(wanted or self.structured_outputs)
        if params is not None and params.num_chars > MAX_SCHEMA_CHARS:
            raise InvalidRequestError(
                "structured_outputs", f"must have at most {MAX_SCHEMA_CHARS} characters, got {params.num_chars}"
            )
        return params


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {**GenerationRequest.unsupported, "suffix": (None, "")}

    prompt: str | Items[int] | Items[str] | Items[Items[int]]
    max_tokens: int | None = DEFAULT_COMPLETION_TOKENS
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None
    add_special_tokens: bool = True

    def with_its_field(self, error: InvalidRequestError) -> InvalidRequestError:
        """The error with the field that the client set."""
        if error.field == "n" and self.best_of is not None:
            return InvalidRequestError("best_of", error.problem)
        if error.field == "prompt_token_ids":
            return InvalidRequestError("prompt", error.problem)
        if error.field.startswith("prompts["):
            return InvalidRequestError(error.field.replace("prompts", "prompt", 1), error.problem, error.code)
        return super().with_its_field(error)


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        **GenerationRequest.unsupported,
        "tools": (None, []),
        "tool_choice": (None, "none", "auto"),
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
        "audio": (None,),
        "modalities": (None, ["text"]),
        "web_search_options": (None,),
        # A template from a client would be a program from a client.
        "chat_template": (None,),
        "continue_final_message": (None, False),
        "add_special_tokens": (None, False),
        "echo": (None, False),
        "best_of": (None, 1),
        "documents": (None, []),
    }

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @property
    def token_limit(self) -> int | None:
        """Maximum number of tokens to generate, from whichever of its two fields is given."""
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise InvalidRequestError("max_completion_tokens", f"is {new}, but max_tokens is {old}; give one of them")
        return old if new is None else new

    def with_its_field(self, error: InvalidRequestError) -> InvalidRequestError:
        """The error with the field that the client set."""
        if self.max_completion_tokens is not None:
            if error.field == "max_tokens":
                return InvalidRequestError("max_completion_tokens", error.problem, error.code)
            if error.field == "min_tokens":
                problem = error.problem.replace("max_tokens", "max_completion_tokens")
                return InvalidRequestError("min_tokens", problem)
        if error.field == "prompt":
            return InvalidRequestError("messages", error.problem, error.code)
        return super().with_its_field(error)


class TokenizeRequest(Body):
    """POST /tokenize: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Items[int]


class ErrorDetail(BaseModel):
    """The error: message, type, field, and code."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorResponse(BaseModel):
    """OpenAI's shape of an error."""

    error: ErrorDetail


def flatten_content(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with their content as text; lists of text parts are joined."""
    flat = []
    for i, message in enumerate(messages):
        content = message.get("content")
        if message.get("tool_calls") or message.get("role") in ("tool", "function"):
            raise InvalidRequestError(f"messages[{i}]", "tool calls are not supported by this server")
        if isinstance(content, list):
            texts = []
            for part in content:
                if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                    kind = part.get("type") if isinstance(part, dict) else part
                    raise InvalidRequestError(
                        f"messages[{i}].content", f"only parts of type 'text' are supported, got {kind!r}"
                    )
                texts.append(part["text"])
            message = {**message, "content": "\n".join(texts)}
        flat.append(message)
    return flat


def _token_numbers(bias: dict[str, float] | None) -> dict[int, float] | None:
    """JSON's names are strings; each must be a token id as JSON writes integers, so that no two are the same id."""
    if bias is None:
        return None
    for name in bias:
        if not re.fullmatch("0|[1-9][0-9]{0,9}", name):
            raise InvalidRequestError("logit_bias", f"keys must be token ids, got {name[:100]!r}")
    return {int(name): value for name, value in bias.items()}
