"""Without `num_threads`, a backend uses a thread for each core that the process may use."""

import pytest
import torch

from support.tiny import make_model
from treadle import LLM
from treadle.core import cpus

OPTIONS = {"num_kv_blocks": 60, "max_num_seqs": 6, "swap_space": 0.0001, "log_stats_interval_s": 0}


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_the_default_number_of_threads_is_lowered_by_quotas_and_omp_num_threads(tmp_path, monkeypatch, kernels):
    before = torch.get_num_threads()
    make_model("tiny", tmp_path)
    try:
        monkeypatch.setattr(cpus.os, "sched_getaffinity", lambda pid: set(range(900, 908)))
        for quotas, limit, threads in (([], "3", 3), ([1.2], "3", 2), ([], "", 8), ([], "many", 8)):
            monkeypatch.setattr(cpus, "cpu_quotas", lambda quotas=quotas: quotas)
            monkeypatch.setenv("OMP_NUM_THREADS", limit)
            engine = LLM(str(tmp_path), cpu_kernels=kernels, **OPTIONS).engine
            assert engine.runner.backend.num_threads == threads
    finally:
        torch.set_num_threads(before)
