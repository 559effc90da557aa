"""Plan a candidate's run without MPI: the limits of its instances, and whether they fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import disagg
from mpillm.comms.messages import JoinReport
from mpillm.cores.registry import BackendRegistry
from mpillm.options.options import parse_run

if TYPE_CHECKING:
    from mpillm.runtime.join import RunPlan

_NODE = "this-node"


def world_size(args: Sequence[str], worker_ranks: int) -> int:
    """Return the number of ranks of a run with these options and `worker_ranks`."""
    return disagg.ranks_for(worker_ranks, parse_run(args).control_ranks)


def plan_of(args: Sequence[str], worker_ranks: int) -> RunPlan:
    """Return the plan of a run with these options and `worker_ranks` on this node.

    Raises ConfigError if the options, the ranks, the model or the memory do not allow it.
    """
    config = parse_run(args)
    import mpi4py

    mpi4py.rc.initialize = False  # this process starts runs, and is not a rank
    from mpillm.runtime.join import plan_run

    core = BackendRegistry.get(config.core_type)
    gpus = core.gpus() if config.device != "cpu" else ()
    report = JoinReport(
        _NODE, 0, 0.0, {"MPI": "Open MPI v5"}, digest=config.digest(), values=config.values, gpus=gpus
    )
    return plan_run(
        config, dict.fromkeys(range(disagg.ranks_for(worker_ranks, config.control_ranks)), report)
    )
