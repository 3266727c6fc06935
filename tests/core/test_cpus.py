import os

import pytest

from treadle.core import cpus


def write(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


@pytest.mark.parametrize(
    ("files", "quotas"),
    [
        ({}, []),
        ({"proc/self/cgroup": "0::/\n"}, []),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, []),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, [2.5]),
        (
            {
                "proc/self/cgroup": "0::/user.slice/shell.scope\n",
                "sys/fs/cgroup/user.slice/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/user.slice/shell.scope/cpu.max": "50000 100000\n",
            },
            [0.5, 4.0],
        ),
        (
            {
                "proc/self/cgroup": "5:memory:/m\n4:cpu,cpuacct:/docker/0123\n3:cpuset:/\n0::/\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            [1.5],
        ),
        (
            {
                "proc/self/cgroup": "1:cpuacct,cpu:/a\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            [3.0],
        ),
    ],
)
def test_quotas_of_both_control_group_versions(tmp_path, files, quotas):
    write(tmp_path, files)
    assert list(cpus.cpu_quotas(tmp_path)) == quotas


@pytest.mark.parametrize(("quotas", "count"), [([], 6), ([2.5, 4.0], 3), ([0.1], 1), ([8.0], 6)])
def test_the_cpu_count_is_the_minimum_of_affinity_and_rounded_up_quotas(monkeypatch, quotas, count):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    monkeypatch.setattr(cpus, "cpu_quotas", lambda: iter(quotas))
    assert cpus.available_cpus() == count


@pytest.mark.parametrize(
    ("allowed", "quotas", "count"),
    [({0, 1, 2, 3}, [], 2), ({0, 3}, [], 2), ({0, 2}, [], 1), ({0, 1, 5}, [], 3), ({0, 1}, [1.0], 1)],
)
def test_processors_that_share_a_core_count_once(monkeypatch, tmp_path, allowed, quotas, count):
    siblings = {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}  # of 5 nothing is known
    write(
        tmp_path,
        {f"sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list": f"{s}\n" for i, s in siblings.items()},
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: allowed)
    monkeypatch.setattr(cpus, "cpu_quotas", lambda: iter(quotas))
    assert cpus.available_cores(tmp_path) == count
