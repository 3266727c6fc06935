"""How long a sequence may be, and how many KV blocks there are: what settings, model and free memory allow."""

import errno
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from treadle.assembly.engine_config import EngineConfig, parse_memory_size, parse_swap_space
from treadle.core.config import CacheConfig
from treadle.core.errors import ConfigError
from treadle.core.memory import available_bytes
from treadle.models.spec import ModelSpec

KV_CACHE_SHARE_OF_FREE_MEMORY = 0.4
MAX_DEFAULT_KV_CACHE_BYTES = 4 * 2**30


def longest_model_len(config: EngineConfig, model: ModelSpec) -> tuple[int, str]:
    """The maximum number of tokens of prompt and output that settings and model allow, and what set it.

    Raises:
        ConfigError: `max_model_len` exceeds what the model can attend to.
    """
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


def most_pool_tokens(config: EngineConfig, model: ModelSpec) -> float:
    """No fewer tokens than the KV pool will hold; known before the weights are read.

    Some models claim millions of positions: what is computed for each of them should not exceed the pool.
    """
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks * config.block_size
    if config.kv_cache_memory is not None:
        num_bytes = parse_memory_size("kv_cache_memory", config.kv_cache_memory)
    elif config.device == "cpu" or not torch.cuda.is_available():
        num_bytes = MAX_DEFAULT_KV_CACHE_BYTES
    else:
        return math.inf
    return max(config.block_size, num_bytes // model.kv_bytes_per_token(element_size=1))


def size_kv_cache(config: EngineConfig, max_model_len: int, block_bytes: int, device: torch.device) -> CacheConfig:
    """The KV pool as set, or as large as free memory and `max_num_seqs` requests of `max_model_len` justify.

    Args:
        config: the user's settings.
        max_model_len: maximum number of tokens of a sequence.
        block_bytes: size of a KV block over all layers.
        device: where the blocks are allocated.

    Raises:
        ConfigError: a size that was set holds no block, or does not fit free memory.
    """
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
        _check_fits("block_size", config.block_size, num_blocks * block_bytes, device)
    swap_bytes = parse_swap_space(config.swap_space)
    if swap_bytes > available_bytes():
        raise ConfigError(
            "swap_space",
            f"is {config.swap_space:g} GiB, but only {_free_in_words(torch.device('cpu'))}; set it lower, or to 0, "
            f"so that preempted requests are recomputed",
        )
    return CacheConfig(
        num_blocks=num_blocks,
        num_host_blocks=swap_bytes // block_bytes,
        block_size=config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
    )


@contextmanager
def memory_for(field: str, problem: str, device: torch.device | None = None) -> Iterator[None]:
    """Turn a failed allocation within the block into a ConfigError.

    Args:
        field: the setting that decides how much is allocated.
        problem: its value and what does not fit.
        device: where it is allocated; None for this machine's memory.
    """
    try:
        yield
    except Exception as error:
        if not _is_out_of_memory(error):
            raise
        device = device or torch.device("cpu")
        raise ConfigError(field, f"{problem}; {_free_in_words(device)} ({error})") from error


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # torch reports a failed allocation on the CPU as a RuntimeError.
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def _free_in_words(device: torch.device) -> str:
    kind = "memory" if device.type == "cpu" else f"{device.type} memory"
    return f"{_free_bytes(device) / 2**30:.1f} GiB of {kind} are free"


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_bytes()


def _check_fits(field: str, value: int | str, num_bytes: int, device: torch.device) -> None:
    if num_bytes > _free_bytes(device):
        raise ConfigError(
            field,
            f"{value} makes a KV pool of {num_bytes / 2**30:.1f} GiB, but only {_free_in_words(device)}",
        )
