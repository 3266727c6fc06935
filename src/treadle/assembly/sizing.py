"""How long a sequence may be, and how many KV blocks there are: what settings, model and free memory allow."""

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


def size_kv_cache(config: EngineConfig, max_model_len: int, block_bytes: int, device: torch.device) -> CacheConfig:
    """The KV pool as set, or as large as free memory and `max_num_seqs` requests of `max_model_len` justify.

    Args:
        config: the user's settings.
        max_model_len: maximum number of tokens of a sequence.
        block_bytes: size of a KV block over all layers.
        device: where the blocks are allocated.

    Raises:
        ConfigError: the size that was set holds no block, or does not fit free memory.
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
