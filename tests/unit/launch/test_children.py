"""Children end with their parent, whatever ends it, and leave their log."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from disagg.errors import ConfigError
from launch.children import Children
from launch.signals import StopSignal
from tests.helpers.support import has_ended

SLEEPER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]
# A child that starts another one and understands no SIGTERM.
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True);"
    "print(p.pid, flush=True); time.sleep(60)",
]


def wait_for(log: Path) -> str:
    end = time.monotonic() + 20
    while not (log.exists() and log.read_text().endswith("\n")):
        assert time.monotonic() < end
        time.sleep(0.02)
    return log.read_text()


def test_exit_code_and_log(tmp_path: Path) -> None:
    with Children() as children:
        child = children.start(
            "tool",
            [sys.executable, "-c", "print('one\\ntwo'); raise SystemExit(3)"],
            os.environ,
            tmp_path / "log",
        )
        assert children.wait(child, 300) == 3
    assert child.tail(1) == "  | two"


def test_a_deadline(tmp_path: Path) -> None:
    with Children(stop_grace_s=5) as children:
        child = children.start("tool", SLEEPER, os.environ, tmp_path / "log")
        assert children.wait(child, 0.2) is None
    assert child.process.poll() == -signal.SIGTERM


def test_grandchildren_end_too(tmp_path: Path) -> None:
    with Children(stop_grace_s=0.3) as children:
        child = children.start("tool", STUBBORN, os.environ, tmp_path / "log")
        grandchild = int(wait_for(tmp_path / "log"))
        assert psutil.pid_exists(grandchild)
    assert child.process.poll() == -signal.SIGKILL
    assert has_ended(grandchild)


def test_a_signal_stops_the_wait(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(StopSignal) as stopped, Children() as children:
        child = children.start("tool", SLEEPER, os.environ, tmp_path / "log")
        wait_for(tmp_path / "log")
        os.kill(os.getpid(), signal.SIGTERM)
        children.wait(child, 300)
    assert stopped.value.code == 128 + signal.SIGTERM
    assert child.process.poll() == -signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_that_python_drops_stops_the_next_wait(tmp_path: Path) -> None:
    """What a signal's handler raises in a callback (here a finalizer) is printed and forgotten."""

    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(StopSignal), Children(stop_grace_s=5) as children:
        child = children.start("sleep", ["sleep", "60"], os.environ, tmp_path / "log")
        Finalized()
        children.wait(child, 300)
    assert child.process.returncode == -signal.SIGTERM


def test_the_signal_that_came_is_passed_on(tmp_path: Path) -> None:
    with pytest.raises(StopSignal) as stopped, Children(pass_on=True) as children:
        child = children.start("tool", SLEEPER, os.environ, tmp_path / "log")
        wait_for(tmp_path / "log")
        os.kill(os.getpid(), signal.SIGINT)
        children.wait(child, 300)
    assert child.process.poll() == -signal.SIGINT
    assert stopped.value.message() == "interrupted (Ctrl-C)" and not stopped.value.is_reported


@pytest.mark.parametrize("pass_on", [True, False])
def test_a_child_that_gets_the_signal_and_has_our_output_names_it(pass_on: bool) -> None:
    with pytest.raises(StopSignal) as stopped, Children(pass_on=pass_on) as children:
        child = children.start("sleep", ["sleep", "60"], os.environ)
        os.kill(os.getpid(), signal.SIGINT)
        children.wait(child, 300)
    assert stopped.value.is_reported == pass_on


def test_a_second_signal_cuts_the_grace_time_short(tmp_path: Path) -> None:
    with pytest.raises(StopSignal), Children(stop_grace_s=600) as children:
        child = children.start("tool", STUBBORN, os.environ, tmp_path / "log")
        wait_for(tmp_path / "log")
        again = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        again.start()
        began = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)
        children.wait(child, 300)
    again.join()
    assert time.monotonic() - began < 300
    assert child.process.poll() == -signal.SIGKILL


POLITE = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), sys.exit(7)));"
    "print(0, flush=True); time.sleep(60)"
)


def test_an_echo_of_a_signal_leaves_the_grace_time(tmp_path: Path) -> None:
    """Slurm sends SIGTERM twice at a job's time limit."""
    with pytest.raises(StopSignal), Children(stop_grace_s=60) as children:
        child = children.start("tool", [sys.executable, "-c", POLITE], os.environ, tmp_path / "log")
        wait_for(tmp_path / "log")
        again = threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGTERM))
        again.start()
        os.kill(os.getpid(), signal.SIGTERM)
        children.wait(child, 300)
    again.join()
    assert child.process.poll() == 7


def test_a_killed_parent(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = (
        "import os, pathlib, time; from launch.children import Children; children = Children().__enter__();"
        f"children.start('t', {SLEEPER!r}, os.environ, pathlib.Path({str(log)!r})); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program])
    wait_for(log)
    (child,) = psutil.Process(parent.pid).children()
    parent.kill()
    parent.wait()
    psutil.wait_procs([child], timeout=300)
    assert has_ended(child.pid)


def test_orphans_are_ended_after_a_time(tmp_path: Path) -> None:
    """A look kills a process whose parent has ended, but not one whose parent lives."""
    with Children() as children:
        first, second = (
            children.start(name, ["sh", "-c", f"sleep 1000 & echo $!; {then}"], os.environ, tmp_path / name)
            for name, then in (("ends", "exit 3"), ("stays", "sleep 1000"))
        )
        assert children.wait(first, 300) == 3
        orphan, kept = (psutil.Process(int(wait_for(tmp_path / name))) for name in ("ends", "stays"))
        children.end_orphans(1000)
        assert orphan.is_running()
        children.end_orphans(0)
        orphan.wait(300)
        assert not orphan.is_running() and kept.is_running() and second.process.poll() is None
        children.end_orphans(0)


def test_a_missing_program(tmp_path: Path) -> None:
    with (
        Children() as children,
        pytest.raises(ConfigError, match="tool: can't start /nowhere/tool: No such file"),
    ):
        children.start("tool", ["/nowhere/tool"], os.environ, tmp_path / "log")


def test_nohup(tmp_path: Path) -> None:
    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Children(stop_grace_s=1) as children:
            child = children.start("tool", SLEEPER, os.environ, tmp_path / "log")
            wait_for(tmp_path / "log")
            os.kill(os.getpid(), signal.SIGHUP)
            assert children.wait(child, 0.3) is None
    finally:
        signal.signal(signal.SIGHUP, hangup)
