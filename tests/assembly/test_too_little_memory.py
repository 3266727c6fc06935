"""Sizes of memory that cannot be: each is a ConfigError with the setting, its value, and what there is."""

import subprocess
import sys

import pytest

from support.native import RUNNABLE
from treadle import LLM
from treadle.core.errors import ConfigError

KERNELS = pytest.mark.parametrize("kernels", ["auto", "off"])

LITTLE_MEMORY = """
import resource, sys
from pathlib import Path
from treadle import LLM
from treadle.core.errors import ConfigError

def load(mebibytes, **options):
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + mebibytes * 2**20, resource.RLIM_INFINITY))
    try:
        LLM(sys.argv[1], cpu_kernels=sys.argv[2], log_stats_interval_s=0, **options)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

load(4096, swap_space=0.001, num_kv_blocks=8)  # what is loaded once takes no memory in what follows
for options in (
    {"swap_space": 0.5, "num_kv_blocks": 8},
    {"swap_space": 0, "kv_cache_memory": "500M"},
    {"swap_space": 0, "num_kv_blocks": 8, "block_size": 512, "max_num_seqs": 65536, "max_num_batched_tokens": 65536},
):
    try:
        load(200, **options)
    except ConfigError as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"swap_space": 1e6},
            r"swap_space: is 1e\+06 GiB, but only .* GiB of memory are free; set it lower, or to 0",
        ),
        ({"swap_space": 1e300}, r"swap_space: must be at most 8589934591 GiB, got 1e\+300"),
        ({"swap_space": "1"}, "swap_space: must be a number, got '1'"),
        (
            {"num_kv_blocks": 10**9},
            "num_kv_blocks: 1000000000 makes a KV pool of .* GiB, but only .* GiB of memory are",
        ),
        ({"num_kv_blocks": 2**31}, "num_kv_blocks: must be at most 2147483647, got 2147483648"),
        ({"kv_cache_memory": 10**30}, "kv_cache_memory: must be at most 9223372036854775807, got 1000"),
        (
            {"kv_cache_memory": "9" * 400 + "T"},
            "kv_cache_memory: must be at most 9223372036854775807 bytes, got '999",
        ),
        ({"block_size": 2**40}, "block_size: must be at most 65536, got 1099511627776"),
        ({"max_num_seqs": 10**9}, "max_num_seqs: must be at most 65536, got 1000000000"),
        ({"max_num_batched_tokens": 2**31}, "max_num_batched_tokens: must be at most 2147483647, got 2147483648"),
        ({"num_threads": 10**9}, "num_threads: must be at most 1024, got 1000000000"),
        ({"age_limit_s": "60"}, "age_limit_s: must be a number, got '60'"),
        ({"log_stats_interval_s": None}, "log_stats_interval_s: must be a number, got None"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching: must be True or False, got 'no'"),
    ],
)
@KERNELS
def test_settings_beyond_any_memory(options, message, kernels, tiny):
    with pytest.raises(ConfigError, match=message):
        LLM(str(tiny.folder), cpu_kernels=kernels, **options)


@KERNELS
def test_allocations_that_fail(kernels, tiny):
    """The free memory that the system states is not always there: here the process may not have it."""
    child = subprocess.run(
        [sys.executable, "-c", LITTLE_MEMORY, str(tiny.folder), kernels],
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    swap, pool, seats = child.stdout.splitlines()
    assert swap.startswith("kv_cache_memory: 8 KV blocks (num_kv_blocks) and ")
    assert pool.startswith("kv_cache_memory: ")
    for line in (swap, pool):
        assert "do not fit; set one of them lower; " in line
        assert "GiB of memory are free (" in line
    assert seats.startswith("max_num_seqs: 65536 sequences of 4096 tokens (max_model_len) need too much memory; ")


@pytest.mark.skipif(not RUNNABLE, reason="needs the native kernels")
def test_weights_that_do_not_fit(tiny, monkeypatch):
    def fail(*args, **options):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("treadle.backends.cpu.arena.mmap.mmap", fail)
    with pytest.raises(ConfigError, match="model: the weights of .* do not fit; choose a smaller model .* are free"):
        LLM(str(tiny.folder))
