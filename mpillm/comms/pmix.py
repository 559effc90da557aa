"""PMIx fence of all ranks after MPI's start under Slurm's PMIx.

MPI_Init of Open MPI ends with a fence that exchanges no data. In such a fence, a PMIx server of version 4
(Slurm may have one) waits only for the ranks of its node. If a rank then sends a message to another node's
rank that is still in MPI_Init, the receiver crashes with a segmentation fault in
`mca_pml_ob1_recv_frag_callback_match`. A fence that exchanges data waits for all nodes.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

_INFO_BYTES = 2048  # more than the size of a pmix_info_t
_BOOL = 1  # PMIX_BOOL


def fence() -> None:
    """Wait until all ranks have called this. If this MPI has no PMIx of version 5, return immediately.

    If a rank is missing, the deadline of MPI's start (`start._deadline`) ends the process, as in MPI_Init.
    """
    try:
        library = loaded("libpmix.so")
        load, wait = library.PMIx_Info_load, library.PMIx_Fence
    except (OSError, AttributeError):
        return
    info = ctypes.create_string_buffer(_INFO_BYTES)
    yes = ctypes.c_bool(True)
    load(info, b"pmix.collect", ctypes.byref(yes), ctypes.c_uint16(_BOOL))
    # An error means that a rank is lost, which is also detected elsewhere.
    wait(None, ctypes.c_size_t(0), info, ctypes.c_size_t(1))


def loaded(name: str) -> ctypes.CDLL:
    """Return a loaded library by the beginning of its file name. Raises OSError if there is none."""
    for path in Path("/proc/self/maps").read_text().split():
        if f"/{name}" in path:
            return ctypes.CDLL(path)
    raise OSError(f"{name} is not loaded")
