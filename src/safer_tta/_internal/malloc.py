"""Keep freed memory for the next step: on a CPU a step then does not wait for cleared pages (docs/performance.md)."""

from __future__ import annotations

import ctypes
import logging

log = logging.getLogger("safer_tta")

# Parameters of glibc's mallopt(3)
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
LARGEST = 2**31 - 1
PAD = 64 * 2**20


def keep_freed_memory() -> bool:
    """Ask the C library not to hand large blocks back to the system after every use.

    glibc returns a block of 32 MB or more the moment it is freed; the next step asks for it again, and the kernel
    clears it again, page by page. A step's activations are such blocks. The process then keeps what it once needed.
    False where the C library is another: nothing changes there.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        log.debug("no mallopt here; the allocator stays as it is")
        return False
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, LARGEST), (M_TOP_PAD, PAD))
    taken = [mallopt(name, value) == 1 for name, value in settings]
    return all(taken)
