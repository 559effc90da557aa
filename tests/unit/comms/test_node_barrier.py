"""The barrier before MPI starts: callers in one process."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import threading
import time

import pytest

from mpillm.comms import node_barrier
from mpillm.comms.node_barrier import meet

N = 5
LONG_S = 120.0
OTHER_USER = os.getuid() + 123_456


def arrive(
    name: str, n: int, came: list[int], patience_s: float = LONG_S, uid: int = os.getuid()
) -> threading.Thread:
    def come() -> None:
        meet(name, n, patience_s, uid)
        came.append(1)

    thread = threading.Thread(target=come)
    thread.start()
    return thread


def test_nobody_goes_on_before_the_last_has_come() -> None:
    name = secrets.token_hex(8)
    came: list[int] = []
    threads = [arrive(name, N, came) for _ in range(N - 1)]
    time.sleep(0.2)
    assert not came
    for thread in [*threads, arrive(name, N, came)]:
        thread.join(LONG_S)
    assert len(came) == N


def test_who_does_not_come_is_not_waited_for() -> None:
    """MPI_Init waits for the rest."""
    came: list[int] = []
    name = secrets.token_hex(8)
    for thread in [arrive(name, N, came, 0.5) for _ in range(N - 1)]:
        thread.join(LONG_S)
    assert len(came) == N - 1


def test_the_first_may_die() -> None:
    """Its connections close, and the others go on."""
    name = secrets.token_hex(8)
    with socket.socket(socket.AF_UNIX) as first:
        first.bind(f"\0{name}".encode())
        first.listen(N)
        came: list[int] = []
        thread = arrive(name, N, came)
        first.accept()[0].close()
    thread.join(LONG_S)
    assert came


def test_the_first_may_close_before_it_has_seen_all() -> None:
    """What waits in its backlog then is reset."""
    name = secrets.token_hex(8)
    came: list[int] = []
    with socket.socket(socket.AF_UNIX) as first:
        first.bind(f"\0{name}".encode())
        first.listen(N)
        thread = arrive(name, N, came)
        select.select([first], [], [], LONG_S)
    thread.join(LONG_S)
    assert came


def test_without_open_mpi_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    namespace = secrets.token_hex(8)
    monkeypatch.delenv("OMPI_COMM_WORLD_LOCAL_SIZE", raising=False)
    monkeypatch.setenv("PMIX_NAMESPACE", namespace)
    with socket.socket(socket.AF_UNIX) as first:
        first.bind(f"\0mpillm-start-{namespace}".encode())
        first.listen(N)
        node_barrier.wait_for_node()
        assert not select.select([first], [], [], 0)[0], "it has come"
        monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "1")
        thread = threading.Thread(target=node_barrier.wait_for_node)
        thread.start()
        assert select.select([first], [], [], LONG_S)[0]
    thread.join(LONG_S)


def test_another_users_process_with_the_name_delays_no_rank() -> None:
    """It listens and says nothing: who is another user's is not waited for, and this user's not for ever."""
    name = secrets.token_hex(8)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(f"\0{name}".encode())
        stranger.listen(N)
        came: list[int] = []
        arrive(name, N, came, 0.1).join(LONG_S)
        assert came
        arrive(name, N, came, uid=OTHER_USER).join(LONG_S / 4)
        assert len(came) == 2


def test_strangers_that_come_count_for_nothing() -> None:
    """Nor do they make anybody wait: who comes again and again is no caller."""
    name, came, over = secrets.token_hex(8), list[int](), threading.Event()

    def come_again() -> None:
        while not over.is_set():
            with socket.socket(socket.AF_UNIX) as stranger, contextlib.suppress(OSError):
                stranger.connect(f"\0{name}".encode())
            time.sleep(0.05)

    thread = threading.Thread(target=come_again)
    thread.start()
    arrive(name, N, came, 0.5, OTHER_USER).join(LONG_S)
    over.set()
    thread.join(LONG_S)
    assert came
