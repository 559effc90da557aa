"""Run an `mpirun`, and end all processes that it started on this node."""

from __future__ import annotations

import contextlib
import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

import psutil

from launch import run_folders, segments
from launch.launcher_monitor import LauncherMonitor
from launch.live_lines import LiveLines
from launch.prctl import adopt_orphans, die_with_parent
from launch.shared_files import mapped
from launch.siblings import StoppedProcesses
from launch.signals import Echoes, stop_signals, title

STOP_GRACE_S = 10.0
"""Seconds that the ranks have to exit by themselves, after Ctrl-C or after rank 0 wrote its exit code."""

KILL_GRACE_S = 3.0
"""Seconds that `mpirun` has to end its ranks before this process kills each of them."""

MPIRUN_GRACE_S = STOP_GRACE_S + 2 * KILL_GRACE_S
"""Seconds that an `mpillm mpirun` may take to stop after a signal, because it ends its ranks itself."""

START_DEADLINE_S = 300.0
"""Seconds that `mpirun` has to start rank 0, which enforces all later deadlines."""

_GUARD_TURNS = 2  # in so many turns of `end_processes`, a server's guard may still clean up


class Supervisor:
    """Runs one `mpirun`, and ends it with all processes that it started on this node.

    `mpirun` gets a separate session. So a terminal's Ctrl-C reaches only this process. It stops the run in
    three steps:

    1. It forwards the first of `launch.signals.stop_signals` to the ranks. A second signal skips the wait. On
       SIGINT or SIGTERM, Open MPI would give the ranks a quarter of a second and drop their last output. So
       Open MPI gets SIGUSR2, which it passes on to every rank. Hydra gets SIGTERM, which it passes on.
    2. After `stop_grace_s`, it makes Open MPI's `mpirun` end its ranks.
    3. After `KILL_GRACE_S`, or immediately with hydra, it kills every process below `mpirun`.

    The same grace time starts when rank 0 has written its exit code, for ranks that hang during their exit.
    If `mpirun` does not start rank 0 (an unreachable host, an ssh that prompts for a password), `mpirun` is
    ended after a deadline. This process adopts orphans (Linux), so it also kills ranks that outlive a killed
    `mpirun`. `mpirun` gets a signal when this process dies.
    """

    def __init__(
        self,
        *,
        openmpi: bool,
        stop_grace_s: float = STOP_GRACE_S,
        start_deadline_s: float = START_DEADLINE_S,
        drains: bool = False,
        draws: bool = False,
        monitor: LauncherMonitor | None = None,
        mpi_start_s: float = 10.0,
    ) -> None:
        """Store the parameters.

        Args:
            openmpi: the `mpirun` is Open MPI's; otherwise hydra's.
            stop_grace_s: time that ranks have to exit by themselves.
            start_deadline_s: time that `mpirun` has to start rank 0.
            drains: after the first signal, rank 0 completes open requests within its own deadline. The grace
                time starts when rank 0 has written its exit code.
            draws: the ranks' output goes through this process, which draws their progress on a terminal.
            monitor: reads the output of the ranks and of mpirun.
            mpi_start_s: time in which MPI starts after rank 0; until then, segments are noted.
        """
        self.never_started = False
        self.lost = ""
        self.finished_at = math.inf  # when rank 0's exit code was noticed (time.monotonic)
        self.killed = 0  # the signal that ended mpirun, if this process has not sent one
        self.pid = 0  # mpirun's process id
        self._start_deadline_s = start_deadline_s
        self._mpi_start_s = mpi_start_s
        self._openmpi = openmpi
        self._grace_s = stop_grace_s
        self._first_grace_s = math.inf if drains else stop_grace_s
        self._signals: list[int] = []
        self._echoes = Echoes()
        self._segments: set[Path] = set()
        self._lines = LiveLines(sys.stdout, sys.stderr)
        self._monitor = monitor
        self._pumps = draws or monitor is not None
        self._stop_signal = signal.SIGUSR2 if openmpi else signal.SIGTERM
        # If hydra's mpirun exits, its proxies kill their ranks. Open MPI's mpirun must be alive to end them.
        self._death_signal = signal.SIGTERM if openmpi else signal.SIGKILL

    def run(
        self,
        line: Sequence[str],
        env: Mapping[str, str],
        started: Callable[[], bool],
        finished: Callable[[], bool],
        on_signal: Callable[[int], None] = lambda number: None,
        lost: Callable[[], str] = lambda: "",
    ) -> tuple[int, int | None]:
        """Run `line`; return its status (negative: a signal), and the signal that interrupted it.

        Args:
            line: arguments of `mpirun`, the program included.
            env: environment of `mpirun`.
            started: returns whether rank 0 has reported that it runs. If it does not report that in time, the
                attribute `never_started` is set.
            finished: returns whether rank 0 has written its exit code.
            on_signal: receives the first signal, before `mpirun` forwards another one to the ranks.
            lost: returns the lost ranks whose loss keeps MPI from starting; stored in the attribute `lost`.
        """
        adopt_orphans()
        before = {child.pid for child in psutil.Process().children()}
        previous = {number: signal.signal(number, self._note) for number in stop_signals()}
        try:
            process = subprocess.Popen(
                line,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if self._pumps else None,
                stderr=subprocess.PIPE if self._pumps else None,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(self._death_signal),
            )
            self.pid = process.pid
            pumps = self._start_pumps(process)
            try:
                self._wait(process, started, finished, on_signal, lost)
            finally:
                self._note_segments(process)
                end_processes(process, before)
                for pump in pumps:  # a pump ends now, because no process that could write is left
                    pump.join(KILL_GRACE_S)
                self._lines.end()
                for segment in self._segments:
                    segment.unlink(missing_ok=True)
                segments.sweep()
                run_folders.sweep()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        # A process stuck in the kernel outlives even SIGKILL.
        status = process.returncode if _ended_within(process, KILL_GRACE_S) else -signal.SIGKILL
        return status, self._signals[0] if self._signals else None

    def _start_pumps(self, process: subprocess.Popen[bytes]) -> list[threading.Thread]:
        omit = self._monitor.read_line if self._monitor else lambda line: False
        pumps = [
            threading.Thread(target=self._lines.pump, args=(source, to, omit), daemon=True)
            for source, to in ((process.stdout, self._lines.out), (process.stderr, self._lines.err))
            if source is not None
        ]
        for pump in pumps:
            pump.start()
        return pumps

    def _print(self, text: str) -> None:
        self._lines.write(own_line(text), self._lines.err)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if not self._echoes.has(number):
            self._signals.append(number)

    def _note_segments(self, process: subprocess.Popen[bytes]) -> None:
        """Note the shared memory of MPICH's ranks on this node while they start.

        A rank that is killed inside MPI_Init leaves shared memory without a record (`launch.segments`).
        """
        if not self._openmpi and self._monitor:
            self._monitor.note_proxies(process.pid)
        if self._openmpi or self._segments:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            for rank in psutil.Process(process.pid).children(recursive=True):
                self._segments |= {path for path in mapped(rank.pid) if path.name.startswith("mpich_shm_")}

    def _wait(
        self,
        process: subprocess.Popen[bytes],
        started: Callable[[], bool],
        finished: Callable[[], bool],
        on_signal: Callable[[int], None],
        lost: Callable[[], str],
    ) -> None:
        """Wait for `process`. Return early if only killing remains."""
        stop_at: float | None = None
        start_by: float | None = time.monotonic() + self._start_deadline_s
        look_until = math.inf
        stopped = StoppedProcesses()
        while not _ended_within(process, 0.25):
            if time.monotonic() < look_until:
                self._note_segments(process)
            for pid, how in stopped.look([process.pid]):
                self._print(f"mpirun (pid {pid}) {how}")
            if stop_at is None and self._monitor and (daemon := self._monitor.lost_hydra_daemon()):
                self._print(daemon)
            if stop_at is None and self._signals:
                self._print(f"{title(self._signals[0])}: stopping the ranks; press Ctrl-C again to kill them")
                on_signal(self._signals[0])
                process.send_signal(self._stop_signal)
                # Before rank 0 has started, no requests are open.
                runs = start_by is None or started()
                grace = self._first_grace_s if runs else self._grace_s
                stop_at = time.monotonic() + grace
            elif (stop_at is None or stop_at == math.inf) and finished():
                self.finished_at = time.monotonic()
                stop_at = self.finished_at + self._grace_s
            elif start_by is not None and started():
                start_by = None
                look_until = time.monotonic() + self._mpi_start_s
            elif stop_at is None and (ranks := lost()):
                self.lost = ranks
                stop_at = time.monotonic()
            elif stop_at is None and start_by is not None and time.monotonic() > start_by:
                self._print(
                    f"mpirun has not started rank 0 within {self._start_deadline_s:g} s (--start_deadline):"
                    " can its host be reached?"
                )
                self.never_started = True
                stop_at = time.monotonic()
            if len(self._signals) > 1 or (stop_at is not None and time.monotonic() > stop_at):
                is_over = self.finished_at != math.inf and not self._signals
                self._print(
                    "the run is over: ending mpirun, which has not"
                    if is_over
                    else "ending the remaining ranks"
                )
                if self._openmpi:
                    process.terminate()
                    _ended_within(process, KILL_GRACE_S)
                return
        self.killed = max(0, -process.returncode)


def _ended_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def end_processes(process: subprocess.Popen[bytes], before: set[int]) -> None:
    """Kill `process`, its descendants, and adopted orphans: each child that is not in `before`."""
    for turn in range(10):  # repeated, because children of a killed parent are then adopted
        own = [child for child in psutil.Process().children() if child.pid not in before]
        if not own and process.poll() is not None:
            return
        below: list[psutil.Process] = []
        for child in own:
            with contextlib.suppress(psutil.NoSuchProcess):
                below += child.children(recursive=True)
        others = [other for other in [*own, *below] if other.pid != process.pid]
        if process.poll() is None:
            process.kill()
            _ended_within(process, KILL_GRACE_S)
        else:
            # `process` has exited by itself; its children may be exiting.
            others = psutil.wait_procs(others, timeout=0.5)[1]
        for other in others:
            with contextlib.suppress(psutil.NoSuchProcess):
                if turn >= _GUARD_TURNS or not is_guard(other):
                    other.kill()
        psutil.wait_procs(others, timeout=1.0)


def is_guard(process: psutil.Process) -> bool:
    """Return whether a process is the guard of a server (see `server_guard`). Raises psutil.NoSuchProcess."""
    return any(arg.endswith("server_guard.py") for arg in process.cmdline())


def own_line(text: str) -> str:
    """Return a message of the launcher as a line."""
    return f"mpillm mpirun: {text}\n"


def print_message(text: str) -> None:
    """Write a message of the launcher to stderr."""
    print(own_line(text), end="", file=sys.stderr, flush=True)
