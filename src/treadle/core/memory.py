"""How much memory this process can still allocate."""

from pathlib import Path


def available_bytes() -> int:
    """Bytes that can be allocated without swapping, within the limit of the control group (Linux)."""
    available = _meminfo("MemAvailable")
    for limit_file, usage_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        limit, usage = _number(limit_file), _number(usage_file)
        if limit is not None and usage is not None:
            available = min(available, max(limit - usage, 0))
    return available


def _meminfo(field: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise OSError(f"/proc/meminfo has no {field}")


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # no such control group, or "max"
        return None
