"""A run's own plan of a candidate, without MPI: what its instances are bounded by, and whether they fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import disagg
from mpillm.comms.messages import JoinReport
from mpillm.cores.registry import BackendRegistry
from mpillm.options.options import parse_run

if TYPE_CHECKING:
    from mpillm.runtime.join import Planned, Prepared

_NODE = "this-node"


def world_size(words: Sequence[str], worker_ranks: int) -> int:
    """Return the ranks of a run with these options and so many worker ranks."""
    return disagg.ranks_for(worker_ranks, parse_run(words).control_ranks)


def plan_of(words: Sequence[str], worker_ranks: int) -> Planned:
    """Return the plan of a run with these options and so many worker ranks on this node.

    Raises ConfigError if the options, the ranks, the model or the memory do not allow it.
    """
    config = parse_run(words)
    import mpi4py

    mpi4py.rc.initialize = False  # this process starts runs; it is no rank of one
    from mpillm.runtime.join import plan_run

    core = BackendRegistry.get(config.core_type)
    gpus = core.gpus() if config.device != "cpu" else ()
    report = JoinReport(
        _NODE, 0, 0.0, {"MPI": "Open MPI v5"}, digest=config.digest(), values=config.values, gpus=gpus
    )
    return plan_run(
        config, dict.fromkeys(range(disagg.ranks_for(worker_ranks, config.control_ranks)), report)
    )


def prepared(planned: Planned, folder: Callable[[], Path]) -> Prepared:
    """Return the data set and LoadGen's settings of the run; once per process (see `load_settings`)."""
    from mpillm.runtime.join import prepare

    return prepare(planned, folder)
