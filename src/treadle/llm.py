"""LLM: the offline API. Names, keywords and results are those of vLLM's LLM class."""

import itertools
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import FrameType
from typing import Any

from tqdm import tqdm

from treadle.assembly.build import build_engine
from treadle.assembly.engine_config import EngineConfig
from treadle.core.config import CacheConfig
from treadle.core.errors import InvalidRequestError
from treadle.core.logs import show_logs
from treadle.core.outputs import RequestOutput
from treadle.core.request import Request
from treadle.core.sampling_params import SamplingParams
from treadle.engine import Engine
from treadle.engine.shared_engine import SharedEngine
from treadle.text.input_processor import Prompt, RequestOptions, as_prompt_list
from treadle.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
Conversation = Sequence[Message]


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Parameters of a beam search. Names and defaults are those of vLLM's BeamSearchParams.

    Attributes:
        beam_width: number of continuations to keep and return.
        max_tokens: maximum number of tokens to generate.
        ignore_eos: do not stop at the model's end-of-sequence ids.
        length_penalty: a sequence's log-probability is divided by its length to this power.
        early_stopping: True, False or "never", as in SamplingParams.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def sampling_params(self) -> SamplingParams:
        """These parameters as SamplingParams."""
        return SamplingParams(
            n=self.beam_width,
            use_beam_search=True,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
        )


class LLM:
    """A model and its engine, for offline use.

    Log lines (the pool's size at startup, statistics every few seconds) go to standard error unless the
    program configures the logger "treadle" itself; TREADLE_LOG_LEVEL=WARNING silences them.

    Calls may overlap: several threads, streams read in turns, a `generate` inside the loop over a `stream`. Their
    requests run in the same steps, and each call gets only its own outputs.

    Args:
        model: the embedded model's name, a folder in Hugging Face layout, a .gguf file, or a hub id.
        on_progress: called with a number from 0 to 1 while weights are read.
        options: the other settings (docs/settings.md): dtype, quantization, max_num_seqs, kv_cache_memory,
            scheduler, …

    Raises:
        ModelLoadError: the model cannot be found or read.
        UnsupportedModelError: Treadle cannot compute the model.
        ConfigError: a setting is invalid.
        EngineError: this process was forked from one that had made an LLM; spawn it instead.
    """

    def __init__(
        self,
        model: str = EngineConfig.model,
        *,
        on_progress: Callable[[float], None] = lambda _: None,
        **options: Any,
    ) -> None:
        self.config = EngineConfig(model=model, **options)
        show_logs()
        self._built = build_engine(self.config, on_progress)
        self._calls = SharedEngine(self._built.engine)
        self._request_ids = map(str, itertools.count())

    @property
    def engine(self) -> Engine:
        """The engine, to observe, or to step by hand while no call of this LLM is in progress."""
        return self._built.engine

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of prompt and output together."""
        return self._built.limits.max_model_len

    @property
    def cache_config(self) -> CacheConfig:
        """Shape of the KV cache: blocks of each tier, slots of a block."""
        return self._built.cache_config

    @property
    def load_time_s(self) -> float:
        """Seconds it took to load the model."""
        return self._built.load_time_s

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """The model's recommended sampling parameters, by SamplingParams' names; many models have none."""
        return self._built.sampling_defaults

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._built.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """SamplingParams with the model's recommended values (its generation config)."""
        return SamplingParams(**self.sampling_defaults)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[RequestOutput]:
        """Continue prompts; returns one RequestOutput per prompt, in the order given.

        Args:
            prompts: text, token ids, {"prompt": …} or {"prompt_token_ids": …}; one of them or a list.
            sampling_params: for all prompts, or one per prompt; the model's defaults if None.
            use_tqdm: show a progress bar.
            options: `priority`, `tenant`, `deadline_s`, `lora_request` (RequestOptions); each for all
                prompts, or a list with one per prompt.

        Raises:
            InvalidRequestError: a prompt or its parameters are invalid; nothing was run.
            Overloaded: the prompts exceed the queue's limits; nothing was run.
        """
        requests = self._make_requests(as_prompt_list(prompts), sampling_params, options)
        return self._run(requests, use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[RequestOutput]:
        """Find the most likely continuations; each RequestOutput's `outputs` are the beams, best first.

        Args:
            prompts: as in `generate`.
            params: of the beam search.
            use_tqdm, options: as in `generate`.
        """
        return self.generate(prompts, params.sampling_params(), use_tqdm=use_tqdm, **options)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer conversations, rendered with the model's chat template.

        Args:
            messages: a list of {"role": …, "content": …}, or a list of such lists.
            sampling_params: as in `generate`.
            use_tqdm: show a progress bar.
            add_generation_prompt: end each prompt with the start of the assistant's turn.
            options: as in `generate`.

        Raises:
            InvalidRequestError: as in `generate`; also when messages are malformed or the model has no
                chat template.
        """
        conversations: Any = messages
        if not isinstance(messages, (list, tuple)) or not messages or isinstance(messages[0], Mapping):
            conversations = [messages]
        prompts = [self.render_chat(c, add_generation_prompt=add_generation_prompt) for c in conversations]
        requests = self._make_requests(prompts, sampling_params, options, add_special_tokens=False)
        return self._run(requests, use_tqdm)

    def render_chat(self, messages: Conversation, *, add_generation_prompt: bool = True) -> str:
        """The prompt that the model's chat template makes of a conversation."""
        return self._built.render_chat(messages, add_generation_prompt=add_generation_prompt)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_special_tokens: bool = True,
        **options: Any,
    ) -> Iterator[RequestOutput]:
        """Continue prompts and yield an output with the new part after every token.

        Each output's `text` and `token_ids` hold only the new part; the last output of a request has a
        `finish_reason`. Closing the iterator early aborts unfinished requests.

        Args:
            prompts, sampling_params: as in `generate`; checked before the iterator is returned.
            add_special_tokens: False for text that already contains the model's special tokens, such as from
                `render_chat`.
            options: as in `generate`.
        """
        requests = self._make_requests(
            as_prompt_list(prompts), sampling_params, options, add_special_tokens=add_special_tokens
        )
        for request in requests:
            self._calls.check(request, stream=True)
        return self._stream(requests)

    def _make_requests(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        options: Mapping[str, Any],
        *,
        add_special_tokens: bool = True,
    ) -> list[Request]:
        params = self._params_per_prompt(len(prompts), sampling_params)
        return self._built.input_processor.make_requests(
            list(itertools.islice(self._request_ids, len(prompts))),
            prompts,
            params,
            _options_per_prompt(len(prompts), options),
            arrival_time=self.engine.clock.now(),
            add_special_tokens=add_special_tokens,
        )

    def _params_per_prompt(
        self, num_prompts: int, sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if sampling_params is None:
            return [self.get_default_sampling_params()] * num_prompts
        if isinstance(sampling_params, SamplingParams):
            return [sampling_params] * num_prompts
        params = list(sampling_params)
        if len(params) != num_prompts:
            raise InvalidRequestError("sampling_params", f"there are {len(params)} of them for {num_prompts} prompts")
        for param in params:
            if not isinstance(param, SamplingParams):
                raise InvalidRequestError("sampling_params", f"must be SamplingParams, got {param!r}")
        return params

    def _run(self, requests: Sequence[Request], use_tqdm: bool) -> list[RequestOutput]:
        results: dict[str, RequestOutput] = {}
        with (
            self._calls.call(requests, stream=False) as next_outputs,
            tqdm(total=len(requests), desc="Requests", unit="req", disable=not use_tqdm) as bar,
            _interrupt_between_steps() as check_interrupt,
        ):
            num_tokens = 0
            while len(results) < len(requests):
                for output in next_outputs():
                    results[output.request_id] = output
                    num_tokens += sum(len(completion.token_ids) for completion in output.outputs)
                    bar.set_postfix_str(f"{num_tokens} tokens", refresh=False)
                    bar.update()
                check_interrupt()
        return [results[request.request_id] for request in requests]

    def _stream(self, requests: Sequence[Request]) -> Iterator[RequestOutput]:
        with self._calls.call(requests, stream=True) as next_outputs:
            num_unfinished = len(requests)
            while num_unfinished:
                with _interrupt_between_steps() as check_interrupt:
                    outputs = next_outputs()
                    check_interrupt()
                for output in outputs:
                    num_unfinished -= output.finished
                    yield output


def _options_per_prompt(num_prompts: int, options: Mapping[str, Any]) -> list[RequestOptions]:
    """RequestOptions per prompt, from keywords with one value for all prompts or a list with one per prompt."""
    known = {field.name for field in fields(RequestOptions)}
    for name, value in options.items():
        if name not in known:
            raise TypeError(f"unexpected keyword {name!r}; valid keywords are {', '.join(sorted(known))}")
        if isinstance(value, list) and len(value) != num_prompts:
            raise InvalidRequestError(name, f"there are {len(value)} of them for {num_prompts} prompts")
    return [
        RequestOptions(**{k: v[i] if isinstance(v, list) else v for k, v in options.items()})
        for i in range(num_prompts)
    ]


@contextmanager
def _interrupt_between_steps() -> Iterator[Callable[[], None]]:
    """Defer Ctrl-C while a step runs, so that the step completes; a second Ctrl-C interrupts at once.

    Yields a function that raises KeyboardInterrupt if Ctrl-C was pressed. It does nothing outside the main thread,
    which alone receives signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    previous = signal.getsignal(signal.SIGINT)
    if previous is None or previous is signal.SIG_IGN:
        yield lambda: None
        return
    interrupted = False

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True

    def check() -> None:
        if interrupted:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, previous)


__all__ = ["LLM", "BeamSearchParams"]
