"""Builds an engine from settings. The only file that depends on all other parts."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle.assembly.engine_config import EngineConfig
from treadle.assembly.sizing import longest_model_len, memory_for, most_pool_tokens, size_kv_cache
from treadle.backends import BackendSettings, choose_backend
from treadle.core.clock import SystemClock
from treadle.core.config import CacheConfig, RequestLimits, policy_name
from treadle.core.errors import InvalidRequestError
from treadle.core.forks import check_not_forked, watch_forks
from treadle.engine import Engine
from treadle.engine.observers import Observer, StatsLogger
from treadle.models.registry import load_model
from treadle.runner import ModelRunner
from treadle.scheduler import Scheduler
from treadle.text import ChatTemplate, Tokenizer
from treadle.text.chat_template import RenderedChat
from treadle.text.input_processor import InputProcessor
from treadle.text.output_processor import OutputProcessor
from treadle.trace.recorder import StepRecorder

logger = logging.getLogger("treadle")


@dataclass(frozen=True)
class BuiltEngine:
    """An engine and its parts.

    Attributes:
        engine: ready to take requests.
        input_processor: makes requests from prompts.
        tokenizer: of the model.
        chat_template: None if the model has none.
        limits: limits of a request.
        sampling_defaults: the model's recommended sampling parameters, by SamplingParams' names.
        cache_config: shape of the KV pool.
        load_time_s: seconds it took to load the model and build the engine.
    """

    engine: Engine
    input_processor: InputProcessor
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    limits: RequestLimits
    sampling_defaults: Mapping[str, Any]
    cache_config: CacheConfig
    load_time_s: float

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> RenderedChat:
        """A conversation as a prompt, rendered with the model's chat template.

        Args:
            messages: a list of {"role": …, "content": …}.
            add_generation_prompt: end with the start of the assistant's turn.
            variables: other variables of the template.

        Raises:
            InvalidRequestError: the model has no chat template, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise InvalidRequestError("messages", "this model has no chat template; send text instead")
        return self.chat_template.render(messages, add_generation_prompt=add_generation_prompt, variables=variables)


def build_engine(config: EngineConfig, on_progress: Callable[[float], None] = lambda _: None) -> BuiltEngine:
    """Load the model and build an engine.

    Args:
        config: the user's settings.
        on_progress: called with a number from 0 to 1 while weights are read.

    Raises:
        ModelLoadError: the model cannot be found or read.
        UnsupportedModelError: Treadle cannot compute the model.
        ConfigError: a setting does not work with this model or this machine.
        EngineError: this process was forked from one in which an engine was built.
    """
    check_not_forked()
    watch_forks()
    start = time.monotonic()
    loaded = load_model(config.model)
    model_config = loaded.config
    if loaded.chat_template is not None and not config.parse_control_tokens_in_chat:
        loaded.chat_template.control_tokens = loaded.tokenizer.special_tokens
    max_model_len, reason = longest_model_len(config, model_config)
    settings = BackendSettings(
        device=config.device,
        dtype=config.dtype,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        cpu_kernels=config.cpu_kernels,
        num_threads=config.num_threads,
        block_size=config.block_size,
        max_model_len=int(min(max_model_len, most_pool_tokens(config, model_config))),
    )
    room = choose_backend(model_config, settings)
    with memory_for(
        "model", f"the weights of {config.model} do not fit; choose a smaller model or quantization int8"
    ):
        backend = room.open(model_config, loaded.weights, settings, on_progress)
    cache_config = size_kv_cache(config, max_model_len, backend.block_bytes, backend.device)
    if max_model_len > cache_config.num_slots:
        reason = (
            f"the KV pool of {cache_config.num_blocks} blocks holds {cache_config.num_slots} tokens; "
            f"raise num_kv_blocks or kv_cache_memory"
        )
        logger.warning("max_model_len is cut from %d to %d: %s", max_model_len, cache_config.num_slots, reason)
        max_model_len = cache_config.num_slots
    scheduler_config = config.scheduler_config(max_model_len)
    clock = SystemClock()
    seats = (
        f"{scheduler_config.max_num_seqs} sequences of {max_model_len} tokens (max_model_len) need too much memory"
    )
    with memory_for("max_num_seqs", seats):
        scheduler = Scheduler(scheduler_config, cache_config, clock)
    observers: list[Observer] = []
    if config.record is not None:
        observers.append(StepRecorder(Path(config.record), scheduler_config, cache_config, clock))
    if config.log_stats_interval_s > 0:
        observers.append(StatsLogger(scheduler.stats, clock, config.log_stats_interval_s))
    limits = RequestLimits(
        max_model_len=max_model_len,
        vocab_size=model_config.vocab_size,
        max_logprobs=min(config.max_logprobs, model_config.vocab_size),
        max_model_len_reason=reason,
    )
    input_processor = InputProcessor(loaded.tokenizer, limits, loaded.eos_token_ids)
    pool = (
        f"{cache_config.num_blocks} KV blocks (num_kv_blocks) and {cache_config.num_host_blocks} blocks to swap to "
        f"(swap_space), of {backend.block_bytes} bytes each, do not fit; set one of them lower"
    )
    with memory_for("kv_cache_memory", pool, backend.device):
        backend.allocate(cache_config.num_blocks, cache_config.num_host_blocks)
    with memory_for("max_num_seqs", seats):
        runner = ModelRunner(
            backend,
            max_num_seqs=scheduler_config.max_num_seqs,
            max_model_len=max_model_len,
            find_grammar=input_processor.grammars.find,
        )
    engine = Engine(
        scheduler,
        runner,
        OutputProcessor(loaded.tokenizer),
        clock,
        observers,
        config.check_invariants,
    )
    load_time_s = time.monotonic() - start
    logger.info("%s: %s, %s, ready in %.1f s", config.model, model_config.architecture, backend, load_time_s)
    logger.info(
        "KV pool: %d blocks of %d = %d tokens (%.0f MiB), room for %.1f requests of max_model_len %d; "
        "%d host blocks to swap to; at most %d sequences, %d tokens a step, scheduler %s, order %s",
        cache_config.num_blocks, cache_config.block_size, cache_config.num_slots,
        cache_config.num_blocks * backend.block_bytes / 2**20,
        cache_config.num_slots / max_model_len, max_model_len, cache_config.num_host_blocks,
        scheduler_config.max_num_seqs, scheduler_config.max_num_batched_tokens,
        policy_name(scheduler_config.scheduler), policy_name(scheduler_config.order),
    )  # fmt: skip
    return BuiltEngine(
        engine=engine,
        input_processor=input_processor,
        tokenizer=loaded.tokenizer,
        chat_template=loaded.chat_template,
        limits=limits,
        sampling_defaults=loaded.sampling_defaults,
        cache_config=cache_config,
        load_time_s=load_time_s,
    )
