"""A submitted Slurm job: its states, its output and its exit code, for ``mpillm sbatch --wait``."""

from __future__ import annotations

import codecs
import contextlib
import math
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from disagg.errors import ConfigError
from launch.environment import clean_environment

_PIECE = 1 << 20  # bytes of output printed at a time
_ANSWER_S = 60.0  # Slurm's commands wait about as long for a silent controller
_SLOW_END_S = 60.0  # time for an epilog, and for Slurm to kill processes that ignore SIGTERM (KillWait)
_MAX_END_S = 600.0
_MAX_OUTAGE_S = 600.0  # a controller that is restarted or replaced answers sooner
_UNKNOWN = 1  # exit code if the job's own is not known
_COMPLETING = "COMPLETING"
_ENDED = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "BOOT_FAIL",
    "DEADLINE",
    "REVOKED",
)
_FIELD = re.compile(r"(?:^|\s)([A-Z][\w/:]*)=")  # its value, up to the next field, may contain spaces


def run_slurm(*command: str, text: str = "", max_s: float = _ANSWER_S) -> str:
    """Return the output of a Slurm command. `text`: its input. Raises ConfigError if the command fails."""
    env = clean_environment(os.environ)
    try:
        done = subprocess.run(command, env=env, input=text, capture_output=True, text=True, timeout=max_s)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{shlex.join(command)}: no answer within {max_s:g} s") from None
    if done.returncode != 0:
        raise ConfigError(f"{shlex.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout.strip()


def follow(number: str, poll_s: float = 2.0, clock: Callable[[], float] = time.monotonic) -> int:
    """Print the job's changes of state and its output until it has ended; return its exit code.

    The state is COMPLETING until all nodes have confirmed the end: see `_SlowEnd`. If Slurm does not answer
    for `_MAX_OUTAGE_S`, return 1.
    """
    before, output, end, slurm = "", _Output(), _SlowEnd(clock), _Controller(number, clock)
    try:
        while not slurm.is_lost:
            if (job := slurm.job()) is None:
                time.sleep(poll_s)
                continue
            state = job["JobState"]
            if state != before:
                where = f" on {job.get('NodeList', 'its nodes')}" if state == "RUNNING" else ""
                print(f"job {number}: {state}{where}", file=sys.stderr, flush=True)
                before = state
            has_ended = state.startswith(_ENDED) or end.is_overdue(number, job)
            output.print_new(Path(job.get("StdOut", "")), final=has_ended)
            if has_ended:
                return _exit_code(job)
            time.sleep(poll_s)
    except (KeyboardInterrupt, SystemExit):  # the command line turns a stop signal into SystemExit
        _print_goes_on(number)
        raise
    _print_goes_on(number)
    return _UNKNOWN


def _print_goes_on(number: str) -> None:
    print(f"job {number} goes on; end it with: scancel {number}", file=sys.stderr, flush=True)


class _Controller:
    """Slurm's controller, which may not answer for a time, for example during its restart."""

    def __init__(self, number: str, clock: Callable[[], float]) -> None:
        self._number, self._clock = number, clock
        self._silent_since: float | None = None
        self.is_lost = False  # there was no answer for `_MAX_OUTAGE_S`

    def job(self) -> dict[str, str] | None:
        """Return the job's fields; None without an answer."""
        try:
            job = _read_job(run_slurm("scontrol", "show", "job", "--oneliner", self._number))
        except ConfigError as error:
            self._note_failure(error)
            return None
        self._silent_since = None
        return job

    def _note_failure(self, error: ConfigError) -> None:
        now, head = self._clock(), f"job {self._number}: {error}"
        if self._silent_since is None:
            self._silent_since = now
            print(f"{head}; trying again for {_MAX_OUTAGE_S:.0f} s", file=sys.stderr, flush=True)
        elif now - self._silent_since >= _MAX_OUTAGE_S:
            self.is_lost = True
            print(f"{head}; no longer followed", file=sys.stderr, flush=True)


class _SlowEnd:
    """Time of a job in state COMPLETING: its command has ended, but a node has not confirmed the end."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = math.inf
        self._is_reported = False

    def is_overdue(self, number: str, job: Mapping[str, str]) -> bool:
        """After a minute, report the nodes that Slurm waits for; return whether the wait is too long."""
        now = self._clock()
        if not job["JobState"].startswith(_COMPLETING):
            self._since, self._is_reported = math.inf, False
            return False
        self._since = min(self._since, now)
        nodes, lasted = job.get("NodeList", "its nodes"), now - self._since
        head = f"job {number}: {_COMPLETING} for {lasted:.0f} s: Slurm waits for {nodes} to confirm the end"
        if lasted >= _MAX_END_S:
            print(f"{head}; no longer followed, exit code {_exit_code(job)}", file=sys.stderr, flush=True)
            return True
        if lasted >= _SLOW_END_S and not self._is_reported:
            self._is_reported = True
            lines = (
                head,
                "its command has ended: an epilog may run, or slurmd does not answer",
                f"look at: scontrol show node {nodes}",
                f"or, without slurmd: scontrol update nodename={nodes} state=down reason=slurmd",
                f"followed for {_MAX_END_S - lasted:.0f} s more",
            )
            print("\n  ".join(lines), file=sys.stderr, flush=True)
        return False


def _read_job(output: str) -> dict[str, str]:
    """Return a job's fields in scontrol's output, by name. Raises ConfigError if the state is missing."""
    _, *fields = _FIELD.split(output)
    job = {name: value.strip() for name, value in zip(fields[::2], fields[1::2], strict=True)}
    if not job.get("JobState"):
        raise ConfigError(f"scontrol show job: expected JobState=…, got: {output[:200]!r}")
    return job


def _exit_code(job: Mapping[str, str]) -> int:
    """Return the exit code of an ended job: its command's, or 128 + signal."""
    code, _, of_signal = job.get("ExitCode", "").partition(":")
    for text, offset in ((code, 0), (of_signal, 128)):
        if text.isdecimal() and len(text) < 4 and int(text):
            return offset + int(text)
    is_done = job["JobState"] == "COMPLETED" or (
        job["JobState"] == _COMPLETING and job.get("Reason", "None") == "None"
    )
    return 0 if is_done else _UNKNOWN


class _Output:
    """The job's output, printed while its file grows."""

    def __init__(self) -> None:
        self._n_read = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may be half written

    def print_new(self, path: Path, final: bool) -> None:
        """Print the new part of the file, which a requeued job truncates. `final`: no more follows."""
        with contextlib.suppress(OSError), path.open("rb") as file:
            if file.seek(0, os.SEEK_END) < self._n_read:
                self._n_read = 0
                self._decoder.reset()
            file.seek(self._n_read)
            while piece := file.read(_PIECE):
                self._n_read += len(piece)
                sys.stdout.write(self._decoder.decode(piece))
        sys.stdout.write(self._decoder.decode(b"", final))
        sys.stdout.flush()
