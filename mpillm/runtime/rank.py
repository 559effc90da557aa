"""A run on one rank: its phases, in order. Needs MPI to be initialized."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import sys
import time
from collections.abc import Callable
from functools import cached_property, partial
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mpi4py import MPI

from disagg.errors import ConfigError
from launch import rank_registry
from launch.reserved_port import ReservedPort
from launch.siblings import visible_pids
from mpillm.comms.communicators import Communicators, RunComms, create_communicators, route_ranks, senders_to
from mpillm.comms.control import RankControl, RunStopped, Timeouts
from mpillm.comms.loop import EventLoop
from mpillm.comms.messages import (
    BEAT,
    STOPPED,
    Beat,
    DrainReport,
    InstanceLoss,
    JoinReport,
    Setup,
    StoppedRank,
)
from mpillm.comms.start import node_name
from mpillm.comms.stopped_ranks import StoppedRanks
from mpillm.comms.transport import Transport
from mpillm.comms.wakeup_socket import WakeupSocket
from mpillm.comms.watch import Watch
from mpillm.cores.capabilities import WorksInAnyThread
from mpillm.cores.registry import BackendRegistry
from mpillm.devices import Gpu, visible_gpus
from mpillm.errors import Failure, InterruptError, RunError
from mpillm.options.fields.deadlines import DEADLINES, FIELD_OF
from mpillm.options.run_config import RunConfig
from mpillm.phases import PHASES, Phase
from mpillm.roles.role import Role
from mpillm.runtime.ending import Ending, Rank0Ending, RankEnding, failures_of
from mpillm.runtime.own_code import code_digest, reports_code
from mpillm.runtime.rank_roles import make_roles
from mpillm.telemetry.cpu_use import CpuMeter
from mpillm.telemetry.gpu_meter import GpuMeter, GpuWatch
from mpillm.telemetry.rank_log import open_rank_log
from mpillm.telemetry.rank_sampler import RankSampler
from mpillm.telemetry.recorder import Recorder
from mpillm.version import __version__

if TYPE_CHECKING:
    from mpillm.runtime.rank0 import Rank0
    from mpillm.runtime.run_session import RunSession

# Until a rank's log is open, log records are dropped: rank 0 reports a failure anyway.
logging.getLogger("mpillm").addHandler(logging.NullHandler())
_log = logging.getLogger(__name__)


class _RankResources(NamedTuple):
    """Resources of a rank besides its roles, after all ranks have joined."""

    comms: Communicators
    route: Transport | None
    machine: dict[str, Any] | None  # description of this node, on the node's first rank only


class Rank:
    """One rank, from joining to stopping."""

    def __init__(
        self,
        comms: RunComms,
        config: RunConfig | None,
        usage_error: str,
        purpose: Callable[[RunConfig | None], type[RunSession]],
        *,
        serves: bool,
    ) -> None:
        """`config`: None if the command line is wrong; `usage_error` is then the error.

        `purpose`: imports and returns the session's class; only rank 0 calls it. `serves`: the test has no
        deadline, and the first signal drains the run.
        """
        comm = comms.control
        self.rank, self.size = comm.rank, comm.size
        self._comms = comms
        self._config = config
        self._usage_error = usage_error
        timeouts = Timeouts(dict(DEADLINES))
        if config is not None:
            phases = {phase: config[field] for phase, field in FIELD_OF.items()}
            timeouts = Timeouts(phases, config.grace, config.heartbeat_timeout)
        if serves:
            timeouts.phases["test"] = math.inf
        self._serves = serves
        self._drain_requested = False
        self._watch = Watch(comm.rank)
        self._control = RankControl(Transport(comm), self._watch, timeouts)
        self._beats = Transport(comm)  # the watch's own, because a transport belongs to one thread
        self._stopped_ranks = StoppedRanks(comm.rank, {})  # of no ranks, until all have joined
        self._wakeup = WakeupSocket()
        self._loop = EventLoop(self._watch, self._wakeup)
        self._loop.pollers.append(self._control.poll)
        self._loop.quiet_s.append(self._control.quiet_s)
        self._roles: list[Role] = []
        self._inline_tasks: list[Callable[[], object]] = []  # used in the test only
        self._senders: set[int] = set()  # ranks that send messages to this rank; empty until the plan exists
        self._first_of_node = False  # also False until the plan exists
        self.log_dir = ""  # the run directory, after rank 0 has created it
        self._test_started = 0.0
        self._cpu: CpuMeter | None = None  # from the start of the test
        self._gpu_uuid = ""  # of this rank's GPU; empty without a GPU
        self._gpu_watch: GpuWatch | None = None  # from the start of the test
        self._recorder = Recorder()
        self._sampler = RankSampler(self._recorder)
        # If a server spans nodes, its process on the first node listens here. The rank only reserves it.
        self._meeting = ReservedPort("0.0.0.0") if config is not None and config.server_nodes > 1 else None
        self._rank0: Rank0 | None = None
        self._ending: Ending = RankEnding(self._control, self._beats, self._roles)
        if self.rank == 0:
            from mpillm.report.console import Console
            from mpillm.runtime.rank0 import Rank0  # it imports LoadGen and data sets: rank 0 only

            started = time.monotonic() - _process_age_s()
            self._rank0 = Rank0(self._control, self.size, config, started, Console(), purpose(config))
            self._ending = Rank0Ending(self._control, self._beats, self._roles, self._rank0)
            # First in the list: it must report a lost rank before another poller raises MPI's error.
            self._loop.pollers.insert(0, self._rank0.control.poll)
        self._watch.connect(self._beat, self._ending.end_stuck, self._ending.abort, self.size)

    def live(self) -> int:
        """Do all phases; return the exit code. After a failure, the process exits here."""
        try:
            code, comms = self._phases()
        except RunStopped as stopped:
            self._ending.stop(stopped)
        except (Exception, InterruptError) as error:  # noqa: BLE001 - any error goes to rank 0 and ends the run
            if (outcome := self._control.outcome) is not None:
                _log.warning("after the last phase: %s", error)
                return self._ending.finish(outcome, None)
            self._ending.fail(failures_of(error, self.rank, self._watch.phase, self._config))
        return self._ending.finish(code, comms)

    def drain(self) -> bool:
        """Start to drain the run, if possible; return whether it has started. Signal handlers call this.

        In a run that serves, the first signal lets rank 0 drain the run. A second signal ends it immediately.
        """
        if not self._serves or self._watch.phase != "test" or self._drain_requested:
            return False
        self._drain_requested = True
        self._wakeup.wake_own()
        return self._rank0 is None or self._rank0.session is None or self._rank0.session.drain()

    def _phases(self) -> tuple[int, Communicators]:
        """Do all phases; return the exit code, and the communicators to free."""
        join, *others, stop = PHASES
        resources = self._set_up(self._phase(join, self._join_report))
        self._ending.last_report = lambda: self._drain_report(resources)
        for phase in others:
            report = {"load": self._servers, "drain": self._ending.last_report}.get(phase)
            urls = self._phase(phase, report)
            if phase == "load":
                for role in self._roles:
                    role.find_servers(urls)
        return int(self._phase(stop)), resources.comms

    def _servers(self) -> dict[int, str] | None:
        """Return the URLs of the servers that this rank owns; None if it owns none."""
        return {index: url for role in self._roles for index, url in role.serves().items()} or None

    def _phase(self, phase: Phase, report: Callable[[], Any] | None = None) -> Any:
        def work() -> None:
            # In other phases, sleeps are short, so rank 0 soon reports a rank whose heartbeat shows it stuck.
            self._wakeup.may_sleep_long = phase == "test"
            # In other phases, the main thread waits for the results of these tasks.
            self._loop.inline_tasks[:] = self._inline_tasks if phase == "test" else ()
            if phase == "test":
                # Objects from the start-up live to the end, so garbage collections need not visit them.
                gc.freeze()
                gc.enable()
                self._test_started = time.perf_counter()
                self._cpu = CpuMeter(of_node=self._first_of_node)
                if self._gpu_uuid and self._sampler.meter is not None:
                    self._gpu_watch = GpuWatch(self._gpu_uuid, self._sampler.meter)
                for role in self._roles:
                    role.record(self._recorder)
            if phase == "health":  # by now, all wake-up sockets are open
                self._wakeup.probe_peers(self._senders)
                how = "sleeps until a wake-up" if self._wakeup.is_reliable else "polls"
                _log.info("when idle, this rank %s", how)
            # A client stops before its server, because the server may wait for its clients.
            for role in reversed(self._roles) if phase == "stop" else self._roles:
                getattr(role, phase)()

        is_done = methodcaller("done", phase)
        done = lambda: all(map(is_done, self._roles))  # noqa: E731 - called for each message
        started = time.perf_counter() - (_process_age_s() if phase == PHASES[0] else 0)
        value = self._control.run_phase(self._loop, phase, work, done, report or (lambda: None))
        self._recorder.phases.append((phase, started, time.perf_counter()))
        return value

    @cached_property
    def _gpus(self) -> tuple[Gpu, ...]:
        """Return this node's GPUs, if the core uses any."""
        config = self._config
        if config and config.server:
            return visible_gpus() or ()
        return BackendRegistry.get(config.core_type).gpus() if config and config.device != "cpu" else ()

    def _join_report(self) -> JoinReport:
        return JoinReport(
            host=node_name(),
            pid=os.getpid(),
            started=time.time() - _process_age_s(),
            versions={
                "mpillm": __version__,
                "Python": sys.version.split()[0],
                "MPI": " ".join(MPI.Get_library_version().split("\n")[0].split(",")[0].strip("\0").split()),
            },
            usage_error=self._usage_error,
            digest=self._config.digest() if self._config else "",
            values=self._config.values if self._config else {},
            gpus=self._gpus,
            pids=visible_pids(),
            code=code_digest() if reports_code() else "",
            port=self._meeting.number if self._meeting else 0,
        )

    def _set_up(self, setup: Setup) -> _RankResources:
        if self._config is None:  # rank 0 reports the error, and does not release any rank
            raise ConfigError(self._usage_error)
        self._control.joined(setup.rank0)
        self._stopped_ranks = StoppedRanks(self.rank, setup.pids.get(visible_pids(), {}))
        rank_registry.report_joined()
        if (gpu := setup.gpus.get(self.rank)) is not None:
            with contextlib.suppress(OSError):  # the run then has no samples of this GPU
                self._sampler.meter = GpuMeter(gpu.device)
                self._gpu_uuid = self._gpus[gpu.device].uuid
        self.log_dir, ranks = setup.log_dir, setup.plan.ranks
        self._ending.directory = Path(setup.log_dir)
        machine = None
        self._first_of_node = all(rank.node != ranks[self.rank].node for rank in ranks[: self.rank])
        if self._first_of_node:
            packages = BackendRegistry.get(self._config.core_type).packages
            # Versions are read now: packages may be replaced while the test runs.
            from mpillm.report.machine import describe_machine

            machine = describe_machine(self._gpus, packages)
        try:
            open_rank_log(Path(setup.log_dir), self.rank)
        except OSError as error:
            cause = f"{error.filename or setup.log_dir}: {error.strerror}"
            raise RunError(Failure(cause, self.rank or None)) from error
        node = ranks[self.rank].node
        self._wakeup.open(setup.token, self.rank, (rank.rank for rank in ranks if rank.node == node))
        control = self._rank0.control if self._rank0 else self._control
        if (pids := control.watched_pids()) is not None:
            self._wakeup.watch_exits(pids, control.check_soon)
        if self._rank0 is not None and (rank_connections := self._rank0.control.connections) is not None:
            rank_connections.on_exit = self._loop.wake
        self._senders = senders_to(self.rank, setup.plan)
        self._control.transport.outlives_others = setup.outlives_losses
        self._control.transport.wake_with(self._wakeup)
        comms = create_communicators(self._comms, setup.plan, self._wakeup)
        on_route = self.rank in route_ranks(setup.plan)
        route = Transport(comms.route, self._wakeup) if on_route else None
        if route is not None:
            route.outlives_others = setup.outlives_losses
        self._control.on_lost = partial(self._lost, route)
        session = self._rank0.session if self._rank0 else None
        has_client = bool(self._config.harness) and not self._config.has_conversations
        serves = self._serves or has_client
        self._roles += make_roles(
            self._config,
            setup,
            comms,
            route,
            session,
            self._control.report,
            self._control.announce,
            self._loop,
            serves=serves,
        )
        # Senders of requests come first, so the leader gets their requests in the same turn of the loop.
        senders, others = (
            [one.poll for one in self._roles if one.sends_requests is it] for it in (True, False)
        )
        self._loop.pollers += [*senders, *([route.dispatch] if route else []), *others]
        self._loop.quiet_s += [*([route.quiet_s] if route else []), *(role.quiet_s for role in self._roles)]
        in_any = serves and issubclass(BackendRegistry.get(self._config.core_type), WorksInAnyThread)
        # Inline tasks exist only with such a core or without any: other cores need the main thread.
        if route and (in_any or (session and ranks[self.rank].instance is None)):
            others = [one.poll for one in self._roles if not (one.sends_requests or one.owns_processes)]
            self._inline_tasks = [*senders, route.dispatch_own, *others, route.dispatch_own]
        if session:
            self._loop.pollers.append(session.poll)
        return _RankResources(comms, route, machine)

    def _lost(self, route: Transport | None, lost: InstanceLoss) -> None:
        _log.warning("instance %d is lost; the run goes on without it", lost.instance)
        if route is not None:
            route.forget(lost.ranks)
        for role in self._roles:
            role.lost(lost.instance)

    def _drain_report(self, resources: _RankResources) -> DrainReport:
        assert self._cpu is not None
        return DrainReport(
            roles=[role.report() for role in self._roles],
            cpu=self._cpu.read(),
            gpu=self._gpu_watch.read() if self._gpu_watch else None,
            messages=resources.route.sent_messages if resources.route else 0,
            message_bytes=resources.route.sent_bytes if resources.route else 0,
            machine=resources.machine,
            telemetry=self.telemetry(),
        )

    def telemetry(self) -> dict[str, Any]:
        """Return this rank's telemetry so far, in seconds after the start of its test."""
        since = self._test_started
        return self._recorder.to_json(since, self.size) | {"samples": self._sampler.to_json(since, self.size)}

    def _beat(self, beat: Beat) -> None:
        """Send a heartbeat: rank 0 to all ranks, the others to rank 0. The watch's thread calls this.

        An exited process gets none: MPICH's UCX would crash this rank, which may have to report the loss.
        """
        self._sampler.sample()
        self._report_stopped()
        beat = beat._replace(
            measured=next((measured for role in self._roles if (measured := role.measured())), None),
            doing=next((doing for role in self._roles if (doing := role.doing())), ""),
        )
        if self._rank0 is not None:
            self._rank0.control.ranks[0].measured, self._rank0.control.ranks[0].doing = beat[3:]
            self._rank0.show_waiting()
            control = self._rank0.control
            dests = sorted(set(range(1, self.size)) - set(control.exited()) - control.lost())
        else:
            dests = [] if self._control.rank0_has_exited() else [0]
        written = BEAT.write(beat)
        for dest in dests:
            with contextlib.suppress(MPI.Exception):  # `dest` is lost, as its missing heartbeat will show
                self._beats.send(dest, BEAT.tag, written)
        with contextlib.suppress(MPI.Exception):
            self._beats.reap()
        self._wakeup.wake_own(beat=True)

    def _report_stopped(self) -> None:
        """Report the ranks of this host that are stopped: to rank 0, but a stopped rank 0 on the console."""
        for rank, how in self._stopped_ranks.look():
            if self._rank0 is not None:
                self._rank0.control.report_stopped(StoppedRank(rank, how))
            elif rank == 0 and (rank0 := self._control.rank0) is not None:
                self._watch.note(f"rank 0 on {rank0.host} (pid {rank0.pid}) {how}")
            else:
                with contextlib.suppress(MPI.Exception):  # rank 0 is lost
                    STOPPED.send(self._beats, 0, StoppedRank(rank, how))


def _process_age_s() -> float:
    """Return the seconds since this process started, including Python's start; 0 if unknown."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return 0.0
