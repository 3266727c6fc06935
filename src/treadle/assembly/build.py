"""Puts the rooms together: from settings to a running engine. The one file that knows them all."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from treadle.assembly.engine_config import EngineConfig, parse_memory_size, parse_swap_space
from treadle.backends import BackendSettings, choose_backend
from treadle.core.clock import SystemClock
from treadle.core.config import CacheConfig, RequestLimits, policy_name
from treadle.core.errors import ConfigError, InvalidRequestError
from treadle.core.memory import available_bytes
from treadle.engine import Engine
from treadle.engine.observers import Observer, StatsLogger
from treadle.models.registry import load_model
from treadle.models.spec import ModelSpec
from treadle.runner import ModelRunner
from treadle.scheduler import Scheduler
from treadle.text import ChatTemplate, Tokenizer
from treadle.text.input_processor import InputProcessor
from treadle.text.output_processor import OutputProcessor
from treadle.trace.recorder import StepRecorder

logger = logging.getLogger("treadle")

KV_CACHE_SHARE_OF_FREE_MEMORY = 0.4
MAX_DEFAULT_KV_CACHE_BYTES = 4 * 2**30


@dataclass(frozen=True)
class BuiltEngine:
    """An engine and what belongs to it.

    Attributes:
        engine: ready to take requests.
        input_processor: makes requests from prompts.
        tokenizer: of the model.
        chat_template: None if the model has none.
        limits: what a request may ask for.
        sampling_defaults: what the model asks for, by SamplingParams' names.
        cache_config: shape of the KV pool.
        load_time_s: seconds that opening the model and reading its weights took.
    """

    engine: Engine
    input_processor: InputProcessor
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    limits: RequestLimits
    sampling_defaults: Mapping[str, Any]
    cache_config: CacheConfig
    load_time_s: float

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt that the model's chat template makes of a conversation.

        Args:
            messages: {"role": …, "content": …} each.
            variables: what else the template may know, `add_generation_prompt` among it.

        Raises:
            InvalidRequestError: the model has no chat template, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise InvalidRequestError("messages", "this model has no chat template; send text instead")
        return self.chat_template.render(messages, **variables)


def build_engine(config: EngineConfig, on_progress: Callable[[float], None] = lambda _: None) -> BuiltEngine:
    """Load the model and build an engine.

    Args:
        config: the user's settings.
        on_progress: called with a number from 0 to 1 while weights are read.

    Raises:
        ModelLoadError: the model cannot be found or read.
        UnsupportedModelError: a model that is not computed here.
        ConfigError: settings that cannot work with this model on this machine.
    """
    start = time.monotonic()
    loaded = load_model(config.model)
    model_config = loaded.config
    max_model_len, reason = _max_model_len(config, model_config)
    settings = BackendSettings(
        device=config.device,
        dtype=config.dtype,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        cpu_kernels=config.cpu_kernels,
        num_threads=config.num_threads,
        block_size=config.block_size,
        max_model_len=max_model_len,
    )
    backend = choose_backend(model_config, settings).open(model_config, loaded.weights, settings, on_progress)
    cache_config = _cache_config(config, max_model_len, backend.block_bytes, backend.device)
    if max_model_len > cache_config.num_slots:
        reason = (
            f"the KV pool of {cache_config.num_blocks} blocks holds {cache_config.num_slots} tokens; "
            f"raise num_kv_blocks or kv_cache_memory"
        )
        logger.warning("max_model_len is cut from %d to %d: %s", max_model_len, cache_config.num_slots, reason)
        max_model_len = cache_config.num_slots
    scheduler_config = config.scheduler_config(max_model_len)
    clock = SystemClock()
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
    backend.allocate(cache_config.num_blocks, cache_config.num_host_blocks)
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


def _max_model_len(config: EngineConfig, model: ModelSpec) -> tuple[int, str]:
    """The length, and what set it."""
    length, reason = model.max_position_embeddings, "the model's length"
    if config.max_model_len is not None:
        if config.max_model_len > length:
            raise ConfigError(
                "max_model_len",
                f"must be at most {length}, the model's max_position_embeddings; got {config.max_model_len}",
            )
        length, reason = config.max_model_len, "as set"
    if model.sliding_window is not None and model.sliding_window < length:
        raise ConfigError(
            "max_model_len",
            f"is {length}, but the model attends only to the last {model.sliding_window} tokens, and sliding "
            f"windows are not supported; set max_model_len to at most {model.sliding_window}",
        )
    return length, reason


def _cache_config(config: EngineConfig, max_model_len: int, block_bytes: int, device: torch.device) -> CacheConfig:
    if config.num_kv_blocks is not None:
        num_blocks = config.num_kv_blocks
        _check_fits("num_kv_blocks", num_blocks, num_blocks * block_bytes, device)
    elif config.kv_cache_memory is not None:
        num_bytes = parse_memory_size("kv_cache_memory", config.kv_cache_memory)
        num_blocks = num_bytes // block_bytes
        if num_blocks < 1:
            raise ConfigError(
                "kv_cache_memory",
                f"must hold at least one block of {config.block_size} tokens, {block_bytes} bytes with this "
                f"model; got {num_bytes}",
            )
        _check_fits("kv_cache_memory", config.kv_cache_memory, num_bytes, device)
    else:
        seats = config.scheduler_config(max_model_len).max_num_seqs
        useful = seats * -(-max_model_len // config.block_size)
        budget = int(_free_bytes(device) * KV_CACHE_SHARE_OF_FREE_MEMORY)
        if device.type == "cpu":
            budget = min(budget, MAX_DEFAULT_KV_CACHE_BYTES)
        num_blocks = max(1, min(useful, budget // block_bytes))
    return CacheConfig(
        num_blocks=num_blocks,
        num_host_blocks=parse_swap_space(config.swap_space) // block_bytes,
        block_size=config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
    )


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_bytes()


def _check_fits(field: str, value: int | str, num_bytes: int, device: torch.device) -> None:
    free = _free_bytes(device)
    if num_bytes > free:
        raise ConfigError(
            field,
            f"{value} makes a KV pool of {num_bytes / 2**30:.1f} GiB, but only {free / 2**30:.1f} GiB of "
            f"{'memory' if device.type == 'cpu' else device.type + ' memory'} are free",
        )
