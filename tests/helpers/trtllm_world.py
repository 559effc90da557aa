"""``python -m tests.helpers.trtllm_world FILE``: a fake of the ranks under `trtllm-llmapi-launch`.

All ranks meet in one MPI world. Then rank 0 makes the file, which the fake of the server waits for.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

from mpi4py import MPI

_LIFE_S = 600.0


def main() -> None:
    """Meet all ranks, print the world and this rank, and wait."""
    world = MPI.COMM_WORLD
    hosts = world.allgather(socket.gethostname())
    print(f"rank {world.rank} (pid {os.getpid()}) of the world {','.join(hosts)}", flush=True)
    if not world.rank:
        Path(sys.argv[1]).touch()
    time.sleep(_LIFE_S)


if __name__ == "__main__":
    main()
