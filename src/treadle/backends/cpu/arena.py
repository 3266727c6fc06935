"""One mapping of memory for all weights, in huge pages where the system has them.

A decode reads every weight once; pages of 2 MiB keep address translation from slowing it down.
"""

import contextlib
import ctypes
import mmap

import numpy as np
import numpy.typing as npt

HUGE_PAGE = 2 * 2**20
ALIGNMENT = 64


class Arena:
    """Allocates aligned pieces of one mapping; pages that are never touched take no memory.

    Args:
        num_bytes: room for all pieces, each rounded up to ALIGNMENT.
    """

    def __init__(self, num_bytes: int) -> None:
        self._mapping = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # the kernel does not support them
                self._mapping.madvise(mmap.MADV_HUGEPAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self._next = -address % HUGE_PAGE
        self._end = self._next + num_bytes

    def take(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """The next piece, all zeros: uint8 [num_bytes]."""
        start = self._next
        if start + num_bytes > self._end:
            raise MemoryError(f"{num_bytes} bytes do not fit the arena, which has {self._end - start} left")
        self._next = round_up(start + num_bytes, ALIGNMENT)
        return np.frombuffer(self._mapping, dtype=np.uint8, count=num_bytes, offset=start)


def round_up(value: int, to: int) -> int:
    """The smallest multiple of `to` that is at least `value`."""
    return -(-value // to) * to
