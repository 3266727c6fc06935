"""Sampling noise that depends on nothing but the request.

The number for one token is a hash of (seed, index of the sequence in its request, index of the output token). The
rest of the batch, the sequence's row and preemptions do not affect it.
"""

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(z: UInt64Array) -> UInt64Array:
    """SplitMix64's output function (Steele, Lea and Flood 2014): a bijection, in which a changed input bit changes
    half of the output bits on average."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniform(
    seeds: UInt64Array, sequence_index: npt.NDArray[np.int32], output_position: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per row, with 53 random bits: float64 [n].

    Args:
        seeds: uint64 [n], of the requests.
        sequence_index: int32 [n], index of the sequence in its request.
        output_position: int64 [n], index of the token among the sequence's outputs.
    """
    with np.errstate(over="ignore"):
        h = _mix(seeds + _GOLDEN)
        h = _mix(h ^ (sequence_index.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
        h = _mix(h ^ (output_position.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (h >> np.uint64(11)).astype(np.float64) * 2.0**-53
