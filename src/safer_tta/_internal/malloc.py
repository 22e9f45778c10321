"""Keep freed memory for the next step: on a CPU a step then does not wait for cleared pages (docs/performance.md).

A service gives it back after a burst of requests.
"""

import contextlib
import ctypes
import gc
import logging

log = logging.getLogger("safer_tta")

# Parameters of glibc's mallopt(3)
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
LARGEST = 2**31 - 1
PAD = 64 * 2**20


def keep_freed_memory() -> bool:
    """Ask the C library to keep large blocks of freed memory for the next step. The process then holds its peak memory.

    By default glibc returns freed blocks of 32 MB or more at once, and the kernel clears them again for the next step.

    Returns:
        Whether the settings were taken; only glibc has them.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        log.debug("no mallopt here; the allocator stays as it is")
        return False
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, LARGEST), (M_TOP_PAD, PAD))
    taken = [mallopt(name, value) == 1 for name, value in settings]
    return all(taken)


def give_back_memory() -> None:
    """Return to the system what `keep_freed_memory` keeps. Without glibc, only unused objects are freed."""
    gc.collect()  # an error holds what its functions worked on, until cycles are looked for
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
