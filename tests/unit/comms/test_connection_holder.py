"""Connections that outlive a rank under Slurm's PMIx. Only the liveness connection closes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import pytest

from tests.helpers.support import wait_until

RANK = """
import os, socket, sys, threading
from mpillm.comms import connection_holder
connection_holder.prepare()
ports = map(int, sys.argv[1:])
pmix, liveness, other = [socket.create_connection(("127.0.0.1", port)) for port in ports]
if os.environ["SLURM_PROCID"] == "0":
    connection_holder.hold(port=liveness.getsockname()[1])
elif os.environ.get("JOINED") != "no":
    connection_holder.hold(rank0=liveness.fileno())
print(os.getpid(), flush=True)
if (said := sys.stdin.readline()) == "leave":
    connection_holder.stop()
elif said == "all":
    connection_holder.let_task_end()
os._exit(5)
"""
UNDER_SRUN = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "PMIX_NAMESPACE": "slurm.pmix.1.0"}


class Rank(NamedTuple):
    task: subprocess.Popen[str]
    pid: int
    pmix: socket.socket
    liveness: socket.socket
    other: socket.socket


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Iterator[Rank]:
    """Start a rank under srun, as `request.param` says; it has three connections."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        ports = [listener.getsockname()[1] for listener in listeners]
        env = UNDER_SRUN | {"PMIX_SERVER_URI41": f"slurm.pmix.1.0.0;tcp4://127.0.0.1:{ports[0]}"}
        process = subprocess.Popen(
            [sys.executable, "-c", RANK, *map(str, ports)],
            env=os.environ | env | getattr(request, "param", {}),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        stack.callback(process.wait)
        stack.callback(process.kill)
        for stream in (process.stdin, process.stdout):
            stack.callback(stream.close)
        connections = [stack.enter_context(listener.accept()[0]) for listener in listeners]
        yield Rank(process, int(process.stdout.readline()), *connections)


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False


@pytest.mark.parametrize("rank", [{}, {"SLURM_PROCID": "0"}], indirect=True, ids=["rank 1", "rank 0"])
def test_a_killed_rank_is_known_by_its_connection_alone(rank: Rank) -> None:
    """Until the server that started it closes its connection: the step has ended.

    Rank 0 is known by those that end at its port.
    """
    os.kill(rank.pid, signal.SIGKILL)
    wait_until(partial(is_closed, rank.liveness), "the end of the liveness connection")
    assert not is_closed(rank.pmix) and not is_closed(rank.other)
    assert rank.task.poll() is None, "the step goes on on this node"
    rank.pmix.shutdown(socket.SHUT_RDWR)
    for connection in (rank.pmix, rank.other):
        wait_until(partial(is_closed, connection), "the end of the connections", 5)
    assert rank.task.wait(300) == -signal.SIGKILL


@pytest.mark.parametrize("rank", [{}, {"SLURM_PROCID": "0"}], indirect=True, ids=["rank 1", "rank 0"])
def test_the_task_of_a_killed_rank_ends_after_rank_0(rank: Rank) -> None:
    """That of rank 0 when another rank has had the time to say so."""
    os.kill(rank.pid, signal.SIGKILL)
    wait_until(partial(is_closed, rank.liveness), "the end of the liveness connection")
    assert rank.task.poll() is None
    rank.liveness.close()
    assert rank.task.wait(300) == -signal.SIGKILL
    assert not is_closed(rank.pmix) and not is_closed(rank.other), "the step ends first"


def test_a_rank_ends_with_its_task(rank: Rank) -> None:
    rank.task.kill()
    wait_until(partial(is_closed, rank.liveness), "the end of the liveness connection")


def test_the_task_outlives_what_slurm_sends_to_all(rank: Rank) -> None:
    rank.task.terminate()
    os.kill(rank.pid, signal.SIGTERM)
    wait_until(partial(is_closed, rank.liveness), "the end of the liveness connection")
    assert rank.task.poll() is None
    rank.liveness.close()
    assert rank.task.wait(300) == -signal.SIGTERM, "as the rank has"


@pytest.mark.parametrize("rank", [{"SLURM_PROCID": "0"}], indirect=True)
def test_rank_0_that_ends_a_run_ends_with_its_task(rank: Rank) -> None:
    assert rank.task.stdin is not None
    rank.task.stdin.write("all")
    rank.task.stdin.close()
    assert rank.task.wait(300) == 5
    assert not is_closed(rank.pmix) and not is_closed(rank.other)


def test_a_rank_that_takes_its_leave_leaves_none(rank: Rank) -> None:
    assert rank.task.stdin is not None
    rank.task.stdin.write("leave")
    rank.task.stdin.close()
    for connection in (rank.pmix, rank.liveness, rank.other):
        wait_until(partial(is_closed, connection), "the end of the connections", 5)
    assert rank.task.wait(300) == 5


@pytest.mark.parametrize(
    "rank",
    [{"PMIX_NAMESPACE": ""}, {"OMPI_COMM_WORLD_RANK": "1"}, {"JOINED": "no"}],
    indirect=True,
    ids=["not PMIx", "mpirun", "before all have joined"],
)
def test_elsewhere_nothing_is_kept(rank: Rank) -> None:
    os.kill(rank.pid, signal.SIGKILL)
    for connection in (rank.pmix, rank.liveness, rank.other):
        wait_until(partial(is_closed, connection), "the end of the connections", 5)
    assert rank.task.wait(300) == -signal.SIGKILL
