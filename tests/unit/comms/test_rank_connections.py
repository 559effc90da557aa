"""Connections to rank 0: the exit of a process is detected, and nothing else counts as an exit."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest

from mpillm.comms.rank_connections import Address, Rank0Connection, RankConnections
from tests.helpers.support import wait_until

HOLD = """
import sys, time
from mpillm.comms.rank_connections import Address, Rank0Connection
address = Address(("127.0.0.1",), int(sys.argv[1]), bytes.fromhex(sys.argv[2]))
line = Rank0Connection(address, int(sys.argv[3]))
while line._connection is None: time.sleep(0.01)
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def connections() -> RankConnections:
    return RankConnections(("127.0.0.1",))


@pytest.fixture
def holders(connections: RankConnections) -> Iterator[list[subprocess.Popen[str]]]:
    """Yield processes that hold the connections of ranks 1 and 2."""
    address = connections.address
    command = [sys.executable, "-c", HOLD, str(address.port), address.key.hex()]
    made = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in (1, 2)]
    try:
        for process in made:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
        yield made
    finally:
        for process in made:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def test_a_killed_process_is_known(
    connections: RankConnections, holders: list[subprocess.Popen[str]]
) -> None:
    assert connections.exited == frozenset()
    holders[1].kill()
    wait_until(lambda: connections.exited, "rank 2's end")
    assert connections.exited == {2}
    holders[0].terminate()
    wait_until(lambda: connections.exited == {1, 2}, "rank 1's end")


def test_a_stopped_process_has_not_ended(
    connections: RankConnections, holders: list[subprocess.Popen[str]]
) -> None:
    holders[0].send_signal(signal.SIGSTOP)
    holders[1].kill()
    wait_until(lambda: connections.exited, "rank 2's end")
    assert connections.exited == {2}


def test_strangers_and_broken_connections_say_nothing(connections: RankConnections) -> None:
    """Neither a stranger without the key nor a connection that the network resets counts as a lost rank."""
    here = ("127.0.0.1", connections.address.port)
    with socket.create_connection(here) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    with socket.create_connection(here):
        pass
    reset = socket.create_connection(here)
    reset.sendall(connections.address.key + struct.pack("!I", 1))
    reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    reset.close()
    own = Rank0Connection(connections.address, 3)
    wait_until(lambda: own._connection, "a connection")
    assert own._connection is not None
    own._connection.close()  # as the end of its process does
    wait_until(lambda: connections.exited, "rank 3's end")
    assert connections.exited == {3}


def test_the_end_of_rank_0_is_known() -> None:
    with socket.create_server(("127.0.0.1", 0)) as rank0:
        line = Rank0Connection(Address(("127.0.0.1",), rank0.getsockname()[1], os.urandom(16)), 5)
        connection, _ = rank0.accept()
        wait_until(lambda: line._connection, "a connection")
        assert not line.has_exited()
        connection.close()
        wait_until(line.has_exited, "the end")


def test_an_address_that_does_not_answer_is_passed_over(connections: RankConnections) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))  # nobody listens there
        _, port, key = connections.address
        line = Rank0Connection(Address(("no.such.host.invalid", "127.0.0.1"), port, key), 1)
        wait_until(lambda: line._connection, "a connection")
