"""The ranks of one engine behind Triton.

Leader mode: mpirun starts a tritonserver for each rank, and all load the model. Rank 0 of MPI's world serves.
The other ranks run its steps and never return from the model's initialization, like TensorRT-LLM's backend.

Orchestrator mode (`ORCHESTRATOR` is 1 in the server's environment): there is one server, whose model starts
the other ranks by MPI_Comm_spawn.

When a process exits, its kernel closes its liveness connection. So rank 0 detects which rank exited even
while its engine waits for that rank in MPI, and the other ranks do not outlive rank 0.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from disagg.errors import ConfigError
from launch.check_world import WrongLauncher
from launch.environment import clean_environment
from launch.exits import RankExit, sentence
from launch.interfaces import own_addresses
from launch.launcher import EveryRankError
from mpillm.comms.communicators import InstanceComms
from mpillm.comms.rank_connections import Rank0Connection, RankConnections
from mpillm.comms.start import node_name, start_mpi
from mpillm.core_names import DEFAULT
from mpillm.cores.base import CoreConfig, LLMCore
from mpillm.cores.registry import BackendRegistry
from mpillm.engine.shape.engine_config import EngineConfig

if TYPE_CHECKING:
    from mpi4py import MPI

ORCHESTRATOR = "TRTLLM_ORCHESTRATOR"
WORKER = "mpillm.triton.models.spawned_rank"
"""Module that MPI_Comm_spawn starts with the Python of `executor_worker_path`."""

_log = logging.getLogger(__name__)
_START_S = 60.0
_LOOK_S = 0.1
_EXPLAIN_S = 2.0  # for a liveness connection to close, after MPI has failed
_END_S = 5.0
_FIRST_SLEEP_S = 20e-6
_MAX_SLEEP_S = 1200e-6
_STOP = 1


def join(config: EngineConfig, python: str) -> Ranks | None:
    """Find or start the other ranks of an engine; None for an engine with a single rank.

    `python`: runs the spawned ranks; its environment has the MPI library. Raises ConfigError if ranks are
    missing.
    """
    if config.tp_size == 1:
        return None
    prefix = Path(python).absolute().parent.parent
    # By default mpi4py searches the environment of the running Python, here the server's.
    os.environ.setdefault("MPI4PY_LIBMPI", f"{prefix / 'lib'}:")
    try:
        if os.environ.get(ORCHESTRATOR) == "1":
            return _spawn(config, python)
        world = start_mpi(["run-llm-server"], _START_S)
    except WrongLauncher as error:
        raise ConfigError(error.problem) from None
    except EveryRankError as error:
        raise ConfigError(str(error)) from None
    if world.size != config.tp_size:
        raise ConfigError(
            f"the engine has {config.tp_size} ranks, and MPI's world {world.size}: start a tritonserver for"
            f" each rank under mpirun, or one with {ORCHESTRATOR}=1; run-llm-server does either"
        )
    return Ranks(world)


def _spawn(config: EngineConfig, python: str) -> Ranks:
    """Start the other ranks on this host, and send them the configuration."""
    folder = str(Path(python).parent)
    clean = clean_environment(os.environ)
    for name in set(os.environ) - set(clean):
        del os.environ[name]
    # MPI starts one of its programs from PATH, which must not load the server's libraries.
    os.environ["PATH"] = f"{folder}:{clean.get('PATH', os.defpath)}"
    os.environ.pop("LD_LIBRARY_PATH", None)
    if os.geteuid() == 0:
        os.environ |= {"PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    alone = start_mpi(["run-llm-server"], _START_S, spawns=True)
    from mpi4py import MPI

    n = config.tp_size - 1
    try:
        world = alone.Spawn(python, ["-m", WORKER], maxprocs=n).Merge(high=False)
    except MPI.Exception as error:
        raise ConfigError(f"MPI_Comm_spawn has not started {n} processes of {python}: {error}") from None
    world.bcast(config, 0)
    return Ranks(world)


def spawned() -> tuple[Ranks, EngineConfig]:
    """Join the process that spawned this one; return the ranks and the engine's configuration."""
    start_mpi([WORKER], _START_S, spawns=True)
    from mpi4py import MPI

    world = MPI.Comm.Get_parent().Merge(high=True)
    config: EngineConfig = world.bcast(None, 0)
    return Ranks(world), config


def make_core(config: EngineConfig, ranks: Ranks | None) -> LLMCore:
    """Create this rank's core, without weights. Raises ConfigError."""
    kind = BackendRegistry.get(DEFAULT)
    if ranks is None:
        core = CoreConfig(DEFAULT, config)
    else:
        core = CoreConfig(DEFAULT, ranks.own(config), rank=ranks.rank)
    kind.check(core)
    return kind(core, None if ranks is None else ranks.comms)


class Ranks:
    """All ranks of an engine; rank 0 leads. The constructor is collective."""

    def __init__(self, world: MPI.Intracomm) -> None:
        from mpi4py import MPI

        world.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank, self.size = world.rank, world.size
        self._control = world
        self.comms = InstanceComms(world.Dup(), world.Dup(), MPI.COMM_SELF.Dup())
        self._node_ranks = world.Split_type(MPI.COMM_TYPE_SHARED).size
        self._processes: list[tuple[str, int]] = world.allgather((node_name(), os.getpid()))
        self._connections = RankConnections(("127.0.0.1", *own_addresses())) if self.rank == 0 else None
        address = world.bcast(self._connections.address if self._connections else None, 0)
        self._rank0_connection = Rank0Connection(address, self.rank) if self.rank else None

    def own(self, config: EngineConfig) -> EngineConfig:
        """Return the configuration of this rank's engine.

        `config`: the instance's, with all of this host's threads.
        """
        return dataclasses.replace(
            config,
            tp_rank=self.rank,
            n_threads=max(1, config.n_threads // self._node_ranks),
            node_ranks=self._node_ranks,
        )

    # --- the leader ---

    def watch(self, lost: Callable[[str], None]) -> None:
        """Call `lost` once, on a thread, with a sentence that names the ranks that have ended."""

        def watch_ranks() -> None:
            while not (text := self.lost()):
                time.sleep(_LOOK_S)
            lost(text)

        threading.Thread(target=watch_ranks, name="mpillm-ranks", daemon=True).start()

    def lost(self, wait_s: float = 0.0) -> str:
        """Return a sentence that names the ranks that have ended; empty if none ends within `wait_s`."""
        assert self._connections is not None
        end = time.monotonic() + wait_s
        while not (ended := self._connections.exited) and time.monotonic() < end:
            time.sleep(_LOOK_S)
        if not ended:
            return ""
        exits = (RankExit(rank, *self._processes[rank], "of the engine has ended") for rank in ended)
        return f"{sentence(exits)}: start the server again"

    def why_failed(self) -> str:
        """Return `lost` after a failure of MPI, which may precede the close of a connection."""
        return self.lost(_EXPLAIN_S)

    # --- the other ranks ---

    def follow(self, core: LLMCore) -> None:
        """Run the leader's steps until it stops or its process exits."""
        connection = self._rank0_connection
        assert connection is not None

        def watch_ranks() -> None:
            while not connection.has_exited():
                time.sleep(_LOOK_S)
            _log.error("rank 0 of the engine has ended")
            time.sleep(_LOOK_S)  # a stop message may have arrived
            os._exit(1)

        threading.Thread(target=watch_ranks, name="mpillm-ranks", daemon=True).start()
        pause = _FIRST_SLEEP_S
        while not self._control.Iprobe(0, _STOP):
            if core.has_work():
                core.poll_responses()
                pause = _FIRST_SLEEP_S
            else:
                time.sleep(pause)
                pause = min(1.5 * pause, _MAX_SLEEP_S)
        self._control.recv(source=0, tag=_STOP)
        _leave_mpi()

    def stop(self) -> None:
        """Stop the other ranks, and finalize MPI with them."""
        from mpi4py import MPI

        if self.lost():
            os._exit(0)  # MPI would wait for the lost ranks
        with contextlib.suppress(MPI.Exception):
            for rank in range(1, self.size):
                self._control.send(None, rank, _STOP)
            _leave_mpi()


def _leave_mpi() -> None:
    """Finalize MPI. A signal ends a process that blocks there, since MPI waits for all ranks with the GIL."""
    from mpi4py import MPI

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, _END_S)
    MPI.Finalize()
    signal.setitimer(signal.ITIMER_REAL, 0)
