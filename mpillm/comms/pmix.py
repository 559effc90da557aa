"""A fence of all ranks, once MPI has started, where Slurm's PMIx has started them.

MPI_Init of Open MPI ends with a fence that exchanges no data. In such a one a PMIx server of version 4, as
Slurm's may be, has the ranks of a node wait for each other only. What a rank sends then ends one of another
node that is still inside MPI_Init by a segmentation fault, in `mca_pml_ob1_recv_frag_callback_match`. A fence
that exchanges data waits for all nodes.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

_INFO_BYTES = 2048  # more than a pmix_info_t takes
_BOOL = 1  # PMIX_BOOL


def fence() -> None:
    """Return when all ranks have called this; at once where this MPI has no PMIx of version 5.

    It has no deadline of its own: that of MPI's start (`start._deadline`) ends the process, as in MPI_Init.
    """
    try:
        library = loaded("libpmix.so")
        load, wait = library.PMIx_Info_load, library.PMIx_Fence
    except (OSError, AttributeError):
        return
    info = ctypes.create_string_buffer(_INFO_BYTES)
    yes = ctypes.c_bool(True)
    load(info, b"pmix.collect", ctypes.byref(yes), ctypes.c_uint16(_BOOL))
    # An error says no more than that somebody is lost, which others find, too.
    wait(None, ctypes.c_size_t(0), info, ctypes.c_size_t(1))


def loaded(name: str) -> ctypes.CDLL:
    """Return a library of this process by the beginning of its file's name. Raises OSError: there is none."""
    for path in Path("/proc/self/maps").read_text().split():
        if f"/{name}" in path:
            return ctypes.CDLL(path)
    raise OSError(f"{name} is not loaded")
