"""How many threads compute, if the user does not say."""

import os

from treadle.core.cpus import available_cores


def default_num_threads() -> int:
    """A thread for each core that this process may use; OMP_NUM_THREADS, if it is a number, lowers it."""
    limit = os.environ.get("OMP_NUM_THREADS", "")
    cores = available_cores()
    return min(cores, int(limit)) if limit.isdigit() and int(limit) else cores
