"""Process of a rank above 0 of an engine behind Triton, in orchestrator mode.

`engine_ranks.join` starts it by MPI_Comm_spawn.
"""

from __future__ import annotations

import sys

from launch.logs import log_to
from mpillm.triton.models.engine_ranks import make_core, spawned


def main() -> None:
    """Load this rank's part of the model, and run the leader's steps until it ends."""
    ranks, config = spawned()
    log_to(sys.stderr, f"rank {ranks.rank} of the engine: %(levelname)s %(message)s")
    core = make_core(config, ranks)
    core.load()
    ranks.follow(core)


if __name__ == "__main__":
    main()
