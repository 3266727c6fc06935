"""How many threads compute, if the user does not say."""

import torch

from treadle.core.cpus import available_cpus


def default_num_threads() -> int:
    """What torch takes (a thread for each core, or OMP_NUM_THREADS), within what this process may use."""
    return min(torch.get_num_threads(), available_cpus())
