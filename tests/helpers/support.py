"""Commands as a person starts them: a process group of their own, a hard timeout, and nothing left behind."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

ROOT = Path(__file__).parents[2]
PYTHONS = {"openmpi": sys.executable, "mpich": os.environ.get("MPILLM_MPICH_PYTHON", "")}

VOCAB_SIZE = 32000  # the dummy core's
CHUNKED = ["--enable_chunked_context", "true"]  # for prompts that are longer than a step
DONE, USAGE, NOT_READY, TEST_FAILED, INSTANCE_LOST = 0, 2, 3, 4, 5  # the design's exit codes

# For what the MPI has little part in: `make test` takes Open MPI alone.
SLOW_WITH_MPICH = pytest.mark.parametrize(
    "mpi", ["openmpi", pytest.param("mpich", marks=pytest.mark.slow)], indirect=True
)

# Of a run around these tests, and of the make that runs them: another make would print where it enters and
# leaves.
_OTHERS = ("MPILLM_EXIT_FILE", "MPILLM_TTY", "MAKELEVEL", "MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES")
_MARKER = "MPILLM_TEST_RUN"
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
_POLL_S = 0.02

PATIENCE = 5
"""Factor of the times after which a test assumes that something hangs: other tests may use the CPU cores."""


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, also if its parent, which may be this process, has not waited."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(
    condition: Callable[[], Any], what: str, seconds: float = 60.0, every_s: float = _POLL_S
) -> Any:
    """Return what `condition` returns once that is true; fails after `PATIENCE` times `seconds`."""
    limit = PATIENCE * seconds
    end = time.monotonic() + limit
    while not (value := condition()):
        assert time.monotonic() < end, f"{what}: not within {limit:g} s"
        time.sleep(every_s)
    return value


def descendants(pid: int) -> list[int]:
    """Return the processes below one, each before those that it has started."""
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, file.read_text().split()):
                found += [child, *descendants(child)]
    return found


@dataclass(repr=False)
class Ended:
    """Tells how a command ended."""

    code: int
    out: str
    err: str
    seconds: float
    log_dir: Path
    left: Sequence[str] = ()  # in /dev/shm

    def __repr__(self) -> str:
        return (
            f"exit code {self.code} after {self.seconds:.1f} s\n--- stdout\n{self.out}\n---"
            f" stderr\n{self.err}"
        )

    def must(self, code: int) -> Ended:
        """Return itself; fail, with all that the command printed, if its exit code is another one."""
        assert self.code == code, f"not exit code {code}\n{self!r}"
        return self

    @property
    def flowing(self) -> str:
        """Return what it printed as one line, with single blanks: long lines are wrapped."""
        return " ".join(self.out.split())

    @property
    def messages(self) -> list[str]:
        """Return the messages on stderr for the person, each with its indented lines.

        The launcher's own begin otherwise.
        """
        return re.findall(r"^mpillm: .*\n?(?:^[ \t]+.*\n?)*", self.err, re.MULTILINE)

    @property
    def message(self) -> str:
        """Return the one message of a failure."""
        assert len(self.messages) == 1, f"{len(self.messages)} messages, not one\n{self!r}"
        return self.messages[0]

    def json(self, name: str) -> Any:
        """Return a JSON file of the run directory."""
        return json.loads((self.log_dir / name).read_text(encoding="utf-8"))

    @property
    def result(self) -> dict[str, Any]:
        return dict(self.json("result.json"))

    def outputs(self) -> list[dict[str, Any]]:
        """Return the lines of outputs.jsonl."""
        return [
            json.loads(line)
            for line in (self.log_dir / "outputs.jsonl").read_text(encoding="utf-8").splitlines()
        ]

    def accuracy_log(self) -> list[tuple[int, list[int]]]:
        """Return (index in the data set, answer) of every entry of LoadGen's accuracy log."""
        return [
            (entry["qsl_idx"], np.frombuffer(bytes.fromhex(entry["data"]), "<i4").tolist())
            for entry in self.json("mlperf_log_accuracy.json")
        ]

    def loadgen(self) -> dict[str, Any]:
        """Return the values of LoadGen's detailed log."""
        lines = (self.log_dir / "mlperf_log_detail.txt").read_text().splitlines()
        entries = [
            json.loads(line.partition(":::MLLOG ")[2]) for line in lines if line.startswith(":::MLLOG ")
        ]
        return {entry["key"]: entry["value"] for entry in entries}


@dataclass
class Command:
    """Is a started command and all that it starts: those have its marker in their environment, whatever else
    they make of themselves."""

    argv: list[str]
    cwd: Path
    log_dir: Path
    env: dict[str, str] = field(default_factory=dict)
    terminal: bool = False  # stdout is one
    controlling: bool = False  # and it is theirs: Ctrl-C in it is a signal, and /dev/tty is it
    one_terminal: bool = False  # stderr is the same terminal, as in front of a person: `out` has both

    def __post_init__(self) -> None:
        self.marker = uuid.uuid4().hex
        env = {name: value for name, value in os.environ.items() if name not in _OTHERS}
        env |= {"PYTHONPATH": str(ROOT), _MARKER: self.marker} | self.env
        self._shm: set[str] = set()
        self._texts: dict[str, str] = {"out": "", "err": ""}
        self.started = time.monotonic()
        terminal = self.terminal or self.controlling
        out, slave = pty.openpty() if terminal else os.pipe()
        if terminal:
            fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        err, err_slave = os.pipe()
        self._keyboard = out
        self.process = subprocess.Popen(
            self.argv,
            cwd=self.cwd,
            env=env,
            stdin=slave if self.controlling else subprocess.DEVNULL,
            stdout=slave,
            stderr=slave if self.one_terminal else err_slave,
            start_new_session=True,
            preexec_fn=(lambda: fcntl.ioctl(slave, termios.TIOCSCTTY, 0)) if self.controlling else None,
        )
        os.close(slave)
        os.close(err_slave)
        self._reader = threading.Thread(target=self._read, args=({out: "out", err: "err"},), daemon=True)
        self._reader.start()

    def _read(self, files: dict[int, str]) -> None:
        while files:
            for fd in select.select(list(files), [], [], 0.5)[0]:
                try:
                    data = os.read(fd, 1 << 16)
                except OSError:  # a terminal whose last process has gone
                    data = b""
                self._texts[files[fd]] += data.decode(errors="replace").replace("\r\n", "\n")
                if not data:
                    os.close(fd)
                    del files[fd]

    @property
    def out(self) -> str:
        """Return what it has printed so far."""
        return self._texts["out"]

    @property
    def err(self) -> str:
        """Return what it has printed on stderr so far."""
        return self._texts["err"]

    # --- its processes ---

    def pids(self) -> list[int]:
        """Return every living process of this command."""
        wanted = f"{_MARKER}={self.marker}".encode()
        return [
            pid
            for path in Path("/proc").iterdir()
            if path.name.isdigit() and wanted in _environment(pid := int(path.name))
        ]

    def rank_pid(self, rank: int) -> int | None:
        """Return the process id of a rank, as soon as it runs the program."""
        wanted = {f"{name}={rank}".encode() for name in _RANK_VARIABLES}
        for pid in self.pids():
            words = _words(pid)
            if (
                wanted & set(_environment(pid))
                and b"run" in words
                and b"-m" in words
                and not any(w.endswith(b"guard.py") for w in words)
            ):
                return pid
        return None

    def wait_rank(self, rank: int) -> int:
        """Wait for a rank to run the program; return its process id."""
        return int(wait_until(lambda: self.rank_pid(rank), f"rank {rank}", every_s=0.05))  # a look is dear

    def wait_phase(self, phase: str, seconds: float = 60.0) -> None:
        """Wait until this phase goes on: in the test LoadGen's log is there, elsewhere the console shows the
        phase before."""
        before = {"load": "join", "health": "load", "warmup": "health", "ready": "warmup", "test": "ready"}[
            phase
        ]
        wait_until(
            lambda: f"\n  {before} " in self.out or self.process.poll() is not None,
            f"phase {phase}",
            seconds,
        )
        if phase == "test":
            detail = self.log_dir / "mlperf_log_detail.txt"
            wait_until(
                lambda: (detail.exists() and detail.stat().st_size) or self.process.poll() is not None,
                "LoadGen's log",
            )
        assert self.process.poll() is None, f"it ended before phase {phase}\n{self.end()!r}"

    def press_ctrl_c(self) -> None:
        """Press Ctrl-C in its controlling terminal."""
        os.write(self._keyboard, b"\x03")

    def signal_group(self, number: int) -> None:
        """Send a signal to the whole process group, as a terminal does on Ctrl-C."""
        os.killpg(self.process.pid, number)

    def end(self, timeout: float = 60.0, tidy: bool = True, lingers: float = 3.0) -> Ended:
        """Wait for its end.

        Fail if it takes longer than `PATIENCE` times `timeout`, leaves a process after `PATIENCE` times
        `lingers` more seconds, or (if `tidy`) leaves a file in /dev/shm.
        """
        timeout *= PATIENCE
        limit = time.monotonic() + timeout
        sampled = 0.0
        while self.process.poll() is None:
            now = time.monotonic()
            if now > limit:
                stacks = [
                    f"{pid}: {b' '.join(_words(pid)).decode(errors='replace')[:150]}" for pid in self.pids()
                ]
                self.kill()
                ended = Ended(-1, self._texts["out"], self._texts["err"], now - self.started, self.log_dir)
                raise AssertionError(
                    f"not ended after {timeout:g} s\n{ended!r}\n--- processes\n" + "\n".join(stacks)
                )
            if now - sampled > 0.5:
                sampled = now
                self._note_shared_memory()
            time.sleep(_POLL_S)
        seconds = time.monotonic() - self.started
        wait_until(lambda: not self.pids(), f"processes {self.pids()} to end", lingers)
        self._reader.join(5)
        ended = Ended(self.process.returncode, self._texts["out"], self._texts["err"], seconds, self.log_dir)
        ended.left = left = self._remove_shared_memory()
        # Ranks that were killed can't tidy up; what they leave is removed above.
        if tidy and ended.code in (DONE, USAGE):
            assert not left, f"left in /dev/shm: {left}\n{ended!r}"
        return ended

    def kill(self) -> None:
        """Kill whatever is left of it."""
        if self.process.poll() is None:  # programs that name their processes, as vLLM, lose our mark
            os.killpg(self.process.pid, signal.SIGKILL)
        unmarked = {below for pid in self.pids() for below in descendants(pid)}
        for _ in range(20):
            pids = self.pids()
            for pid in unmarked.union(pids):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not pids:
                break
            time.sleep(_POLL_S)
        self.process.wait()
        self._reader.join(5)
        self._remove_shared_memory()

    def _note_shared_memory(self) -> None:
        for pid in self.pids():
            with contextlib.suppress(OSError):
                self._shm.update(
                    re.findall(r"(/dev/shm/\S+)$", Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE)
                )

    def _remove_shared_memory(self) -> list[str]:
        left = [name for name in sorted(self._shm) if Path(name).exists()]
        for name in left:
            Path(name).unlink()
        return left


def _environment(pid: int) -> list[bytes]:
    """Return the environment that a process was started with; empty for one that is no more, or a zombie."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _words(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


class Starter:
    """Starts commands of one test with one MPI; the fixture kills what a failed test leaves."""

    def __init__(self, mpi: str, folder: Path) -> None:
        self.mpi = mpi
        self.python = PYTHONS[mpi]
        self.folder = folder
        self.commands: list[Command] = []

    def command(
        self,
        argv: Sequence[object],
        log_dir: Path | None = None,
        env: dict[str, str] | None = None,
        **options: Any,
    ) -> Command:
        """Start any command line."""
        command = Command(
            [str(word) for word in argv], self.folder, log_dir or self.folder / "run", env or {}, **options
        )
        self.commands.append(command)
        return command

    def start(
        self,
        ranks: int,
        *options: object,
        core: str = "dummy",
        log_dir: Path | None = None,
        env: dict[str, str] | None = None,
        **more: Any,
    ) -> Command:
        """Start ``python -m mpillm mpirun -n RANKS run --core_type CORE --log_dir … OPTIONS``."""
        force = [] if log_dir else ["--force"]  # a test may run several times
        log_dir = log_dir or self.folder / "run"
        head = [
            self.python,
            "-m",
            "mpillm",
            "mpirun",
            "-n",
            ranks,
            "run",
            "--core_type",
            core,
            "--log_dir",
            log_dir,
            *force,
            "--join_deadline",  # the default is too short for many ranks on a busy machine
            300,
        ]
        return self.command([*head, *options], log_dir, env, **more)

    def run(self, ranks: int, *options: object, timeout: float = 60.0, **more: Any) -> Ended:
        """Start a run, and wait for its end."""
        return self.start(ranks, *options, **more).end(timeout)

    def mpillm(self, *words: object, **options: Any) -> Ended:
        """Run ``python -m mpillm WORDS`` to its end."""
        return self.command([self.python, "-m", "mpillm", *words], **options).end()

    def plain(self, ranks: int, *program: object, python: str = "", **options: Any) -> Command:
        """Start ``mpirun -n RANKS PROGRAM`` with the mpirun beside `python`, this starter's unless another is
        given."""
        python = python or self.python
        own = ["--oversubscribe", "--bind-to", "none"] if python == PYTHONS["openmpi"] else []
        env = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} | options.pop("env", {})
        return self.command([Path(python).parent / "mpirun", *own, "-n", ranks, *program], env=env, **options)


@dataclass
class Samples:
    """Holds a data set in a file, and what the dummy core answers to it."""

    path: Path
    prompts: list[list[int]]

    def answer(self, index: int, n_tokens: int) -> list[int]:
        """Return what the dummy core answers: token j is (a hash of the prompt, order included) + j.
        mpillm/cores/dummy.py is said again here so that a mistake there shows."""
        seed = sum(token * (2 * i + 1) for i, token in enumerate(self.prompts[index]))
        return [(seed + j) % VOCAB_SIZE for j in range(n_tokens)]


def make_samples(path: Path, lengths: Sequence[int], seed: int = 0) -> Samples:
    """Write random prompts of these lengths, of bytes, which is what the tokenizer without a model has.

    Their answers begin differently, so that no answer can pass for another's.
    """
    random = np.random.default_rng(seed)
    seen: set[int] = set()
    samples = Samples(path, [])
    for length in lengths:
        while True:
            samples.prompts.append(random.integers(0, 256, length).tolist())
            first = samples.answer(len(samples.prompts) - 1, 1)[0]
            if first not in seen:
                break
            samples.prompts.pop()
        seen.add(first)
    path.write_text(
        "".join(json.dumps({"input_tokens": prompt}) + "\n" for prompt in samples.prompts), encoding="utf-8"
    )
    return samples
