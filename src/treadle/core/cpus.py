"""How many processors this process may use."""

import math
import os
from collections.abc import Collection, Iterator
from pathlib import Path


def available_cpus() -> int:
    """The processors in this process's affinity mask, or fewer if a control group (Linux) has a lower CPU quota.

    A quota of 2.5 processors counts as 3.
    """
    return max(1, math.ceil(min([len(_affinity()), *cpu_quotas()])))


def available_cores(root: Path = Path("/")) -> int:
    """As `available_cpus`, but processors that share a core (Linux) count once: together they compute little more.

    Args:
        root: the folder that has `sys`.
    """
    topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    cores = {_read(root / topology.format(cpu)).strip() or str(cpu) for cpu in _affinity()}
    return min(len(cores), available_cpus())


def _affinity() -> Collection[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def cpu_quotas(root: Path = Path("/")) -> Iterator[float]:
    """The CPU quotas, in processors, of the control groups (version 1 and 2) that this process is in.

    Args:
        root: the folder that has `proc` and `sys`.
    """
    groups = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = groups / controllers
        if controllers and not mount.is_dir():
            mount = groups / "cpu"
        # In a container the path may be the host's, and its own group is mounted at the root: all of them are asked.
        group = Path(path.lstrip("/"))
        for folder in (mount / group, *(mount / parent for parent in group.parents)):
            if controllers:
                quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
            else:
                quota, _, period = _read(folder / "cpu.max").partition(" ")
            if quota.strip().isdigit() and period.strip().isdigit():  # else there is none: "max", -1
                yield int(quota) / int(period)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
