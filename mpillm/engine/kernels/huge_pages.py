"""Ask the kernel for pages of 2 MiB where weights lie: a product that reads them from memory gets faster.

Decode reads all weights for a few rows. With pages of 4 KiB the processor cannot fetch ahead beyond a page,
and looks up 512 times as many. The products of SmolLM2-135M's layers measured 1.03 (8 rows) and 1.12 times
(40 rows) as fast in float32 with huge pages, 1.36 and 1.09 times in bfloat16.
"""

from __future__ import annotations

import ctypes

_SIZE = 2 << 20
_SMALL = 256 << 10
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # linux/mman.h; the second one since Linux 6.1


def use_huge_pages(address: int, n_bytes: int) -> None:
    """Move memory to huge pages, unless it is small; what lies beside it on the same 2 MiB comes along.

    Only a hint: the kernel may have no huge pages, or forbid them.
    """
    if n_bytes < _SMALL:
        return
    start, end = address // _SIZE * _SIZE, -(-(address + n_bytes) // _SIZE) * _SIZE
    madvise = ctypes.CDLL(None).madvise
    for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
        # Its result is no matter: 2 MiB of which a part is not mapped keep their small pages.
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)


def keep_freed_memory() -> None:
    """Let malloc keep what tensors free, for the next ones.

    glibc gives it back, and each page is cleared anew. A step's rows come and go in every layer: 77,000 page
    faults in a step of 1,942 tokens of SmolLM2-135M, 0.2 of its 2.5 s.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
