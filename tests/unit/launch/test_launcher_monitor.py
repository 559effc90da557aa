"""What mpirun's own words tell the launcher."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from launch.exits import RankExit
from launch.launcher_monitor import LauncherMonitor
from launch.rank_registry import RankRegistry
from tests.helpers.support import wait_until

# As printed by Open MPI 5.0.11 and 4.1.6, and MPICH 5.0.2.
LOST = """\
PRTE has lost communication with a remote daemon.

  HNP daemon   : [prterun-head-48@0,0] on node head
  Remote daemon: [prterun-head-48@0,2] on node h2

This is usually due to either a failure of the TCP network
"""
OLDER = """\
ORTE has lost communication with a remote daemon.

  HNP daemon   : [[50237,0],0] on node head
  Remote daemon: [[50237,0],2] on node h2
"""
FAILED = """\
A daemon failed to report back after being spawned. This could
be due to several factors, including inability to find the
  Local host:    head
  Remote host:   h2
  Daemon exit status: 137
"""
HYDRA = "[mpiexec@head] control_cb (/src/pm/hydra/mpiexec/pmiserv_cb.c:280): assert (!closed) failed\n"
MPIRUN = """
import subprocess, sys, time
for i in "01":
    shell = [sys.executable, "-c", "import time; time.sleep(60)", "--proxy-id", i]
    print(subprocess.Popen(shell).pid, flush=True)
time.sleep(60)
"""


def read_lines(made: LauncherMonitor, text: str) -> None:
    for line in text.splitlines(keepends=True):
        made.read_line(line)


@pytest.fixture
def registry() -> RankRegistry:
    """Return the registry of four ranks on two hosts, all of which have registered."""
    made = RankRegistry(4)
    made._hosts = {0: "h1", 1: "h1", 2: "h2", 3: "h2"}
    return made


@pytest.mark.parametrize("text", [LOST, OLDER, FAILED])
def test_the_host_of_a_lost_daemon(registry: RankRegistry, text: str) -> None:
    made = LauncherMonitor(registry)
    read_lines(made, text)
    how = ", which was ended by signal 9 (SIGKILL)" if text == FAILED else ""
    message = f"mpirun has lost its daemon on h2{how}, and ended all ranks"
    assert made.lost_openmpi_daemon(math.inf) == f"host h2 (ranks 2-3): {message}"
    assert made.lost_openmpi_daemon(time.monotonic() - 60) == "", "the run had ended long before"


def test_other_output_is_not_a_lost_daemon(registry: RankRegistry) -> None:
    made = LauncherMonitor(registry)
    read_lines(made, "  Remote host:   h2\nDaemon exit status: 137\nmpillm: failed in phase 'test'\n")
    assert made.lost_openmpi_daemon(math.inf) == "" and made.failure_is_printed


def test_hydras_lost_daemon(registry: RankRegistry) -> None:
    """Its shell is the one that has ended; the numbers are those of the hosts, in the ranks' order."""
    process = subprocess.Popen([sys.executable, "-c", MPIRUN], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = [int(process.stdout.readline()) for _ in range(2)]
    made = LauncherMonitor(registry)
    made.hydra_ends_s = 0.1
    try:

        def noted() -> bool:  # a program that has just been started has no arguments for a moment
            made.note_proxies(process.pid)
            return made._proxies == {0, 1}

        wait_until(noted, "both shells")
        os.kill(pids[1], signal.SIGKILL)
        read_lines(made, HYDRA)
    finally:
        for pid in (*pids, process.pid):
            os.kill(pid, signal.SIGKILL)
        process.communicate()
    expected = "host h2 (ranks 2-3): mpirun has lost its daemon on h2, and ended all ranks"
    assert made.exits_before_rank_0(255) == expected


def test_hydra_goes_on_without_a_daemon(registry: RankRegistry) -> None:
    """It is told once, and not when all of them end with the run."""
    made = LauncherMonitor(registry)
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        made._note_proxy(1, process.pid)
        made._note_proxy(0, os.getpid())
    assert made.lost_hydra_daemon() == "", "the run may just be ending"
    made.goes_on_s = 0.0
    assert made.lost_hydra_daemon() == (
        "host h2 (ranks 2-3): mpirun has lost its daemon on h2; its ranks go on, but their output is lost"
    )
    assert made.lost_hydra_daemon() == "" == LauncherMonitor(registry).lost_hydra_daemon()


@pytest.mark.parametrize("ended", [[0, 1], [0, 1, 3]])
def test_a_host_without_reports(registry: RankRegistry, ended: list[int]) -> None:
    """All shells have ended when Hydra's message is read: their order of exit is unknown."""
    made = LauncherMonitor(registry)
    made.hydra_ends_s = 0.1
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        made._note_proxy(0, process.pid)
        made._note_proxy(1, process.pid)
    read_lines(made, HYDRA)
    for rank in ended:
        registry._on_exit((rank, 7, 0, b"h", b""))
    expected = "host h2 (ranks 2-3): mpirun has lost its daemon on h2, and ended all ranks"
    assert made.exits_before_rank_0(255) == (expected if ended == [0, 1] else "")


@pytest.mark.parametrize("is_silent", [True, False])
def test_the_shell_of_another_host_may_end_first(registry: RankRegistry, is_silent: bool) -> None:
    """The host without power is the one of which nothing is heard, at last."""
    made = LauncherMonitor(registry)
    made.hydra_ends_s = 0.5 if is_silent else 30.0
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        made._note_proxy(0, process.pid)
        made._note_proxy(1, os.getpid())
    read_lines(made, HYDRA)
    registry._on_exit((0, 7, 0, b"h", b""))
    if not is_silent:
        threading.Timer(0.2, registry._on_exit, [(2, 7, 0, b"h", b"")]).start()
    lost = "host h2 (ranks 2-3): mpirun has lost" if is_silent else "host h1 (ranks 0-1): mpirun has lost"
    assert made.exits_before_rank_0(255).startswith(lost)


def test_ranks_that_exited_before_rank_0(registry: RankRegistry) -> None:
    assert LauncherMonitor().exits_before_rank_0(1) == LauncherMonitor(registry).exits_before_rank_0(1) == ""
    registry._exited = (RankExit(2, "h2", 7, at=8.0), RankExit(0, "h1", 5, at=10.0))
    message = LauncherMonitor(registry).exits_before_rank_0(137)
    assert message == "rank 2 on h2 (pid 7) has ended; then mpirun, with 137, and all ranks"
