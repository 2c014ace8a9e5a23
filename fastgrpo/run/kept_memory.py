"""On a CPU with glibc, the memory that a step frees stays with the process.

A step allocates its activations anew, and frees them in its backward pass. glibc gives memory of this size back to the
system at once, so that the kernel has to find, zero and map the same pages in every step. A GPU needs nothing of this:
torch keeps the memory that it frees there.
"""

import ctypes
import os
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of <malloc.h>
VARIABLES = "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"  # of the environment, `man mallopt`


def keep_freed_memory() -> bool:
    """Let glibc's malloc keep what this process frees, unless the environment says how it is to behave.

    It takes no more memory than the process had at once, because what comes next is taken from what was freed.
    """
    chosen = any(name in os.environ for name in VARIABLES) or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
    if chosen or not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # Large blocks come from the heap, in place of a mapping of their own, and the heap does not shrink.
    return mallopt is not None and bool(mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, -1))
