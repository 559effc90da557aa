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
from launch.live_lines import LiveLines
from launch.prctl import adopt_orphans, die_with_parent
from launch.shared_files import mapped
from launch.siblings import StoppedProcesses
from launch.signals import Echoes, stop_signals, title
from launch.witness import Witness

STOP_GRACE_S = 10.0
"""How long the ranks have to end by themselves, after Ctrl-C or after rank 0 told its exit code."""

KILL_GRACE_S = 3.0
"""How long `mpirun` has to end its ranks before they are killed one by one."""

MPIRUN_GRACE_S = STOP_GRACE_S + 2 * KILL_GRACE_S
"""How long an `mpillm mpirun` that is told to stop may take: it ends its ranks itself."""

START_DEADLINE_S = 300.0
"""How long `mpirun` has to start rank 0, which keeps the deadlines of all that follows."""


# After rank 0 has started; by then MPI has, too. One rank on a node makes no segment, and looking takes CPU.
_LOOK_S = 10.0
_GUARD_TURNS = 2  # in which what stands over a server may tidy up, once that is killed


class Supervisor:
    """Runs one `mpirun`, and ends it with all processes that it started on this node.

    `mpirun` gets a separate session. So a terminal's Ctrl-C reaches only this process. It stops the run in
    three steps:

    1. It forwards the first of `launch.signals.stop_signals` to the ranks. A second signal skips the wait. On
       SIGINT or SIGTERM, Open MPI would give the ranks a quarter of a second and drop their last output, but
       it passes SIGUSR2 on to every rank. Hydra passes SIGTERM on.
    2. After `stop_grace_s`, it makes Open MPI's `mpirun` end its ranks.
    3. After `KILL_GRACE_S`, or immediately with hydra, it kills every process below `mpirun`.

    The same grace time starts when rank 0 has written its exit code, for ranks that hang during their exit.
    If `mpirun` does not start rank 0 (an unreachable host, an ssh that prompts for a password), it is ended
    after a deadline. This process adopts orphans (Linux), so it also kills ranks that outlive a killed
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
        witness: Witness | None = None,
    ) -> None:
        """`openmpi`: the `mpirun` is Open MPI's; hydra's otherwise.

        `drains`: after the first signal rank 0 ends what is open, under a deadline of its own; the grace time
        begins when it has told its exit code. `draws`: the ranks' output goes through this process, which
        draws their progress on a terminal. `witness` hears it, and what mpirun prints.
        """
        self.never_started = False
        self.lost = ""
        self.told_at = math.inf  # when rank 0 was seen to have told its exit code (time.monotonic)
        self.killed = 0  # the signal that ended mpirun, if nobody here has sent one
        self.pid = 0  # mpirun's
        self._start_deadline_s = start_deadline_s
        self._openmpi = openmpi
        self._grace_s = stop_grace_s
        self._asked_grace_s = math.inf if drains else stop_grace_s
        self._signals: list[int] = []
        self._echoes = Echoes()
        self._segments: set[Path] = set()
        self._lines = LiveLines(sys.stdout, sys.stderr)
        self._witness = witness
        self._pumps = draws or witness is not None
        self._ask = signal.SIGUSR2 if openmpi else signal.SIGTERM
        # hydra's proxies kill their ranks when mpirun is gone; Open MPI's mpirun has to be alive to end them.
        self._at_our_death = signal.SIGTERM if openmpi else signal.SIGKILL

    def run(
        self,
        line: Sequence[str],
        env: Mapping[str, str],
        started: Callable[[], bool],
        finished: Callable[[], bool],
        tell: Callable[[int], None] = lambda number: None,
        lost: Callable[[], str] = lambda: "",
    ) -> tuple[int, int | None]:
        """Start `line` and wait; return its status (negative: by a signal), and the signal that interrupted
        it. `started` and `finished` say whether rank 0 has told that it runs, and that the run is over.
        `never_started`: it did not in time. `tell` tells the ranks which signal it was, before another one
        reaches them. `lost` names ranks without which MPI can't start; then this attribute does."""
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
                preexec_fn=lambda: die_with_parent(self._at_our_death),
            )
            self.pid = process.pid
            pumps = self._start_pumps(process)
            try:
                self._wait(process, started, finished, tell, lost)
            finally:
                self._note_segments(process)
                end_processes(process, before)
                for pump in pumps:  # at its end: nobody is left who could write
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
        hear = self._witness.hear if self._witness else lambda line: False
        pumps = [
            threading.Thread(target=self._lines.pump, args=(source, to, hear), daemon=True)
            for source, to in ((process.stdout, self._lines.out), (process.stderr, self._lines.err))
            if source is not None
        ]
        for pump in pumps:
            pump.start()
        return pumps

    def _say(self, text: str) -> None:
        self._lines.write(own_line(text), self._lines.err)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if not self._echoes.has(number):
            self._signals.append(number)

    def _note_segments(self, process: subprocess.Popen[bytes]) -> None:
        """Note the shared memory of MPICH's ranks on this node while they start.

        A rank that is killed inside MPI_Init leaves it, and has no record of it yet (`launch.segments`).
        """
        if not self._openmpi and self._witness:
            self._witness.note_proxies(process.pid)
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
        tell: Callable[[int], None],
        lost: Callable[[], str],
    ) -> None:
        """Wait for `process`, and return early when only killing is left to do."""
        stop_at: float | None = None
        start_by: float | None = time.monotonic() + self._start_deadline_s
        look_until = math.inf
        stopped = StoppedProcesses()
        while not _ended_within(process, 0.25):
            if time.monotonic() < look_until:
                self._note_segments(process)
            for pid, how in stopped.look([process.pid]):
                self._say(f"mpirun (pid {pid}) {how}")
            if stop_at is None and self._witness and (who := self._witness.goes_on_without()):
                self._say(who)
            if stop_at is None and self._signals:
                self._say(f"{title(self._signals[0])}: stopping the ranks; press Ctrl-C again to kill them")
                tell(self._signals[0])
                process.send_signal(self._ask)
                # Before rank 0 has started nobody drains requests.
                runs = start_by is None or started()
                grace = self._asked_grace_s if runs else self._grace_s
                stop_at = time.monotonic() + grace
            elif (stop_at is None or stop_at == math.inf) and finished():
                self.told_at = time.monotonic()
                stop_at = self.told_at + self._grace_s
            elif start_by is not None and started():
                start_by = None
                look_until = time.monotonic() + _LOOK_S
            elif stop_at is None and (who := lost()):
                self.lost = who
                stop_at = time.monotonic()
            elif stop_at is None and start_by is not None and time.monotonic() > start_by:
                self._say(
                    f"mpirun has not started rank 0 within {self._start_deadline_s:g} s (--start_deadline):"
                    " can its host be reached?"
                )
                self.never_started = True
                stop_at = time.monotonic()
            if len(self._signals) > 1 or (stop_at is not None and time.monotonic() > stop_at):
                is_over = self.told_at != math.inf and not self._signals
                self._say(
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
    """Kill `process`, what it started, and the orphans that became ours: each child not in `before`."""
    for turn in range(10):  # killing a parent can bring up its children; what is stuck in the kernel stays
        mine = [child for child in psutil.Process().children() if child.pid not in before]
        if not mine and process.poll() is not None:
            return
        below: list[psutil.Process] = []
        for child in mine:
            with contextlib.suppress(psutil.NoSuchProcess):
                below += child.children(recursive=True)
        others = [other for other in [*mine, *below] if other.pid != process.pid]
        if process.poll() is None:
            process.kill()
            _ended_within(process, KILL_GRACE_S)
        else:
            # It ended by itself: what it started may just be ending, too.
            others = psutil.wait_procs(others, timeout=0.5)[1]
        for other in others:
            with contextlib.suppress(psutil.NoSuchProcess):
                if turn >= _GUARD_TURNS or not is_guard(other):
                    other.kill()
        psutil.wait_procs(others, timeout=1.0)


def is_guard(process: psutil.Process) -> bool:
    """Return whether a process stands over a server (see `server_guard`). Raises psutil.NoSuchProcess."""
    return any(word.endswith("server_guard.py") for word in process.cmdline())


def own_line(text: str) -> str:
    """Return a line of the launcher's own."""
    return f"mpillm mpirun: {text}\n"


def say(text: str) -> None:
    """Write a line of the launcher's own to stderr."""
    print(own_line(text), end="", file=sys.stderr, flush=True)
