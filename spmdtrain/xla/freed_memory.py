"""The allocator of the C library: memory that it keeps for the next step on CPU."""

import ctypes
import glob
import os

_SETTINGS = (
    "MALLOC_ARENA_MAX",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_TRIM_THRESHOLD_",
    "GLIBC_TUNABLES",
)
# NVIDIA, also in WSL; AMD; TPUs.
_ACCELERATORS = (
    "/dev/nvidia[0-9]*",
    "/dev/dxg",
    "/dev/kfd",
    "/dev/accel*",
    "/dev/vfio/[0-9]*",
)
# The parameters of mallopt(3).
_MXFAST, _TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = 1, -1, -4, -8
_NEVER = -1  # of the threshold


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory for the next step, if this process will compute on CPU.

    XLA allocates the temporary arrays of each step, and frees them after it. glibc returns memory
    of more than 32 MB to the system at once, so that each step has a page fault for each of its
    pages: a quarter of the time of a small transformer. With one arena, no `mmap` and no trimming,
    the memory stays. Without fast bins, threads that share the arena rarely wait for each other.

    Call it before a second thread allocates: a thread keeps the arena of its first allocation. It
    does nothing if the user has set the allocator, with another C library, and on a machine with
    NVIDIA or AMD GPUs or TPUs.
    """
    if not _is_glibc() or any(name in os.environ for name in _SETTINGS) or not _is_cpu_only():
        return
    mallopt = ctypes.CDLL(None).mallopt
    for parameter, value in (
        (_ARENA_MAX, 1),
        (_MMAP_MAX, 0),
        (_TRIM_THRESHOLD, _NEVER),
        (_MXFAST, 0),
    ):
        mallopt(parameter, value)


def _is_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError):  # no such function, or another C library
        return False


def _is_cpu_only() -> bool:
    """Returns whether JAX will find no accelerator, without importing it."""
    if platforms := os.environ.get("JAX_PLATFORMS"):
        return platforms == "cpu"
    return not any(glob.glob(pattern) for pattern in _ACCELERATORS)
