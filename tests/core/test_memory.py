from pathlib import Path

from treadle.core import memory


def test_available_memory_is_positive_and_at_most_the_total():
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < memory.available_bytes() <= total


def test_a_control_group_limits_available_memory(monkeypatch):
    limits = {"/sys/fs/cgroup/memory.max": 5_000_000, "/sys/fs/cgroup/memory.current": 1_000_000}
    monkeypatch.setattr(memory, "_number", limits.get)
    assert memory.available_bytes() == 4_000_000
