"""Without `num_threads`, a backend uses at most as many threads as the process may use processors."""

import pytest
import torch

from support.tiny import make_model
from treadle import LLM
from treadle.core import cpus

OPTIONS = {"num_kv_blocks": 60, "max_num_seqs": 6, "swap_space": 0.0001, "log_stats_interval_s": 0}


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_a_cpu_quota_lowers_the_default_number_of_threads(tmp_path, monkeypatch, kernels):
    before = torch.get_num_threads()
    make_model("tiny", tmp_path)
    try:
        torch.set_num_threads(3)
        monkeypatch.setattr(cpus.os, "sched_getaffinity", lambda pid: set(range(8)))
        for quotas, threads in (([], 3), ([1.2], 2)):
            monkeypatch.setattr(cpus, "cpu_quotas", lambda quotas=quotas: quotas)
            engine = LLM(str(tmp_path), cpu_kernels=kernels, **OPTIONS).engine
            assert engine.runner.backend.num_threads == threads
    finally:
        torch.set_num_threads(before)
