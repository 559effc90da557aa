"""A rank of an engine that follows one behind Triton, in orchestrator mode: a process of its own.

MPI_Comm_spawn starts it (`engine_ranks.join`).
"""

from __future__ import annotations

import sys

from launch.logs import log_to
from mpillm.triton.models.engine_ranks import make_core, spawned


def main() -> None:
    """Load this rank's part, and follow the leader to its end."""
    ranks, config = spawned()
    log_to(sys.stderr, f"rank {ranks.rank} of the engine: %(levelname)s %(message)s")
    core = make_core(config, ranks)
    core.load()
    ranks.follow(core)


if __name__ == "__main__":
    main()
