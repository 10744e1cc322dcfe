"""Memory of a worker process: kept between two samples, not given back and asked for again."""

from __future__ import annotations

import ctypes
import os

# What malloc.h of glibc calls them.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_IN_HEAP = 1 << 25  # bytes; the most that glibc allows: what is larger always comes fresh
_KEPT = 1 << 28  # bytes at the end of the heap that are free and are kept all the same

_SAID_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


def keep_freed_memory() -> bool:
    """Have this process keep the memory that one sample needed for the next one.

    A processor makes and frees tensors of some ten megabytes for each picture. By itself glibc gives the end
    of the heap back to the system when it is larger than about 64 MB, so it is luck what happens: the same
    work was seen to take one page fault or a million, which is a quarter of its time. This is for processes
    that do nothing else; it holds until they end.

    Returns:
        Whether it was done: not where the user has said something on it (``MALLOC_TRIM_THRESHOLD_`` and its
        like), nor with another C library than glibc.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if any(name in os.environ for name in _SAID_BY_USER) or "_threshold" in tunables:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all([mallopt(_M_MMAP_THRESHOLD, _LARGEST_IN_HEAP), mallopt(_M_TRIM_THRESHOLD, _KEPT)])
