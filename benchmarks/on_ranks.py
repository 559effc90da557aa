"""Common to the benchmarks on several ranks of an mpirun: start, a GPU per rank, one deadline, and end."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from disagg.errors import ConfigError
from launch.check_world import WrongLauncher
from launch.environment import write_exit_code
from launch.launcher import EveryRankError
from launch.signals import stop_signals
from mpillm.comms.start import start_mpi
from mpillm.cores.torch_core import TorchCore
from mpillm.devices import share_out
from mpillm.errors import ExitCode
from mpillm.options.command_line import Parser
from mpillm.options.field import Field
from mpillm.options.fields import DEADLINES
from mpillm.options.fields.model import ModelFields
from mpillm.options.parsers import seconds
from mpillm.options.values import Values, collect

if TYPE_CHECKING:
    from mpi4py import MPI


class RankOptions(Values):
    """Options of each of these benchmarks."""

    device = ModelFields.device.but(
        "where the ranks compute", default="cuda", choices=("cpu", "cuda"), group="benchmark"
    )
    deadline = Field(
        "deadline", "longest time for the benchmark, seconds", seconds, default=900.0, group="benchmark"
    )


R = TypeVar("R", bound=RankOptions)


def run_on_ranks(
    argv: Sequence[str],
    options: type[R],
    parser: Parser,
    work: Callable[[R, MPI.Intracomm, int | None], None],
    n_ranks: int | None = None,
) -> int:
    """Call ``work(options, world, GPU's index, or None on CPUs)`` on every rank; return the exit code.

    An error on one rank ends all, as does the deadline: the others may be waiting for that rank. Raises
    EveryRankError for a bad option, the wrong number of ranks, or too few GPUs.
    """
    for number in stop_signals():
        signal.signal(number, signal.SIG_DFL)  # a handler could not run while MPI waits
    try:
        config = collect(argv, options, parser)
        world = start_mpi((), DEADLINES["join"])
        watchdog = threading.Timer(config.deadline, _give_up, (world, config.deadline))
        watchdog.daemon = True
        watchdog.start()
        if n_ranks not in (None, world.size):
            raise ConfigError(f"{n_ranks} ranks are needed, not {world.size}: mpirun -n {n_ranks}")
        device = _own_gpu(world) if config.device == "cuda" else None
    except WrongLauncher as error:
        raise EveryRankError(error.problem) from None
    except ConfigError as error:
        raise EveryRankError(str(error)) from None
    try:
        work(config, world, device)
    except ConfigError as error:
        print(f"mpillm: {error}", file=sys.stderr, flush=True)
        world.Abort(ExitCode.USAGE)
    except Exception:  # noqa: BLE001 - the others may be waiting for this rank
        traceback.print_exc()
        world.Abort(1)
    watchdog.cancel()
    if world.rank == 0:
        write_exit_code(ExitCode.DONE)
    return ExitCode.DONE


def _own_gpu(world: MPI.Intracomm) -> int:
    seen = world.allgather((os.uname().nodename, TorchCore.gpus()))
    devices: dict[int, int] = {}
    for node in {node for node, _ in seen}:
        devices |= share_out(
            [rank for rank, (name, _) in enumerate(seen) if name == node], [gpus for _, gpus in seen]
        )
    if len(devices) < world.size:
        raise ConfigError(f"--device cuda: {world.size} ranks, {len(devices)} GPUs")
    return devices[world.rank]


def _give_up(world: MPI.Intracomm, deadline: float) -> None:
    print(f"mpillm: rank {world.rank}: not done after --deadline {deadline:g} s", file=sys.stderr, flush=True)
    world.Abort(1)
