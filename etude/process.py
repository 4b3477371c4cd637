"""What a process that computes with tensors on a CPU should ask of its C library first."""

import ctypes
import platform


def keep_freed_memory() -> bool:
    """Lets the process keep large freed buffers instead of handing each back to the kernel. True where it
    took effect.

    glibc serves every allocation above 128 KiB to 32 MiB with a fresh mapping and unmaps it when it is freed.
    A network's forward and backward pass allocate and free such buffers hundreds of times a step, and each
    new mapping is zeroed by the kernel page by page on first touch: attention of the tiny network took 29 ms
    so, and 4.4 ms from kept memory. The price is that memory once used stays with the process. Nothing
    happens where the C library is not glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    mmap_threshold, trim_threshold = -3, -1  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD of malloc.h
    return mallopt(mmap_threshold, 2**30) == 1 and mallopt(trim_threshold, 2**31 - 1) == 1
