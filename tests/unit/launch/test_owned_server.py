"""What is said of an owned server's end."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launch import owned_server
from launch.command import Command
from launch.owned_server import OwnedServer
from launch.shared_files import SHM
from launch.supervisor import end_processes
from tests.helpers.descriptors import only_large_descriptors
from tests.helpers.support import descendants, wait_until

TRACES = """
import os, signal, subprocess, time

def trace(number, frame):
    subprocess.run(["sleep", "0.6"])
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)

signal.signal(signal.SIGSEGV, trace)
print("up" * 3, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGKILL])
def test_its_guard_is_what_has_ended(tmp_path: Path, number: int) -> None:
    """Not a program of the server's that did so just before."""
    words = "import subprocess, time\nwhile True: subprocess.run(['sleep', '0.3']); time.sleep(0.1)"
    server = OwnedServer(Command((sys.executable, "-c", words)), tmp_path / "server.log")
    try:
        wait_until(lambda: server._first_exit[1], "a program to end")
        os.kill(server._guard.pid, number)
        why = wait_until(server.ended, "its end")
    finally:
        server.stop(1.0)
    assert why == f"its guard (pid {server._guard.pid}) has ended"


def test_its_end_is_noticed_by_an_owner_with_many_open_files(tmp_path: Path) -> None:
    """Such as the HTTP client with a connection for each request."""
    with only_large_descriptors():
        server = OwnedServer(Command(("sleep", "60")), tmp_path / "server.log")
        try:
            wait_until(lambda: server.pids, "its process", seconds=10)
            os.kill(server.pids[0], signal.SIGKILL)
            why = wait_until(server.ended, "its end", seconds=10)
        finally:
            server.stop(1.0)
    assert why == "was ended by signal 9 (SIGKILL)"


def test_what_its_guard_computes_is_not_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that hangs would seem to do something."""
    real_stat = owned_server._stat
    looks: set[int] = set()

    def stat(pid: int) -> list[str]:
        fields = real_stat(pid)
        if pid == server._guard.pid:
            fields[11] = "100000"
        looks.add(pid)
        return fields

    server = OwnedServer(Command(("sleep", "60")), tmp_path / "server.log")
    try:
        monkeypatch.setattr(owned_server, "_stat", stat)
        wait_until(lambda: looks >= {server._guard.pid, *server.pids} and server.pids, "a look at both")
        looks.clear()  # at the second look, the first has been summed
        wait_until(lambda: looks, "the next look")
        assert server.cpu_s < 100
    finally:
        server.stop(1.0)


def test_a_server_that_writes_where_it_was(tmp_path: Path) -> None:
    """As tritonserver, which starts a program for each line of its stack: none of those is the cause."""
    server = OwnedServer(Command((sys.executable, "-c", TRACES)), tmp_path / "server.log")
    try:
        wait_until(lambda: "upupup" in server.tail() and server.pids, "it to be up")
        os.kill(server.pids[0], signal.SIGSEGV)
        why = wait_until(server.ended, "its end")
    finally:
        server.stop(1.0)
    assert why.startswith("was ended by signal 11 (SIGSEGV)"), why


# The engine is large, and waits for its worker as vLLM's does; the server outlives both for a while.
CHAIN = """
import subprocess, sys, time

worker = [sys.executable, "-c", "import time; time.sleep(60)"]
engine = "import subprocess, time; x = b'x' * (300 << 20); subprocess.run(%r); time.sleep(0.6)" % worker
subprocess.run([sys.executable, "-c", engine])
time.sleep(60)
"""


@pytest.mark.parametrize("looked_at", ["as it runs", "as it ends"])
def test_a_worker_whose_parent_reaped_it_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looked_at: str
) -> None:
    """Its parent also fails: the error names the worker.

    A process that ends frees its memory some time before its exit.
    """
    killed = False

    def stat(pid: int) -> list[str]:
        fields = real_stat(pid)
        if killed and looked_at == "as it ends":
            fields[21] = "0"
        return fields

    real_stat = owned_server._stat
    monkeypatch.setattr(owned_server, "_stat", stat)
    server = OwnedServer(Command((sys.executable, "-c", CHAIN)), tmp_path / "server.log")
    try:
        wait_until(lambda: len(server.pids) == 3, "three processes")
        wait_until(lambda: any(one.resident > 300 << 20 for one in server._processes.values()), "a large one")
        server.ready()
        (worker,) = [pid for pid in server.pids if not descendants(pid)]
        os.kill(worker, signal.SIGKILL)
        killed = True
        why = wait_until(server.ended, "its end")
    finally:
        server.stop(1.0)
    assert why.startswith(f"process {worker} ("), why


# Four processes map a file; when there is another file, one of them allocates memory.
MAPS = """
import mmap, os, sys, time

first = os.getpid()
for _ in range(3):
    os.getpid() == first and os.fork()
with open(sys.argv[1], "rb") as file:
    shared = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
touched = sum(shared[::mmap.PAGESIZE])
while os.getpid() != first or not os.path.exists(sys.argv[1] + ".more"):
    time.sleep(0.05)
more = b"x" * (150 << 20)
time.sleep(60)
"""


def test_memory_that_its_processes_share_counts_once(tmp_path: Path) -> None:
    """Such as the checkpoint that all workers of a server map."""
    path, limit = tmp_path / "file", 120 << 20
    path.write_bytes(bytes(40 << 20))
    command = Command((sys.executable, "-c", MAPS, str(path)))
    server = OwnedServer(command, tmp_path / "server.log", max_bytes=limit)
    try:
        wait_until(
            lambda: server.ended() or sum(one.resident for one in server._processes.values()) > limit,
            "four processes with the file",
        )
        time.sleep(0.5)  # more looks
        assert server.ended() == ""
        (first,) = [pid for pid in server.pids if len(descendants(pid)) == 3]
        path.with_suffix(".more").touch()
        why = wait_until(server.ended, "its end")
    finally:
        server.stop(1.0)
    assert " GiB of memory, more than --server_memory_limit; most of it process " in why
    assert f"process {first} (" in why


# It makes shared memory, and its child does.
MAKES = """
import mmap, os, sys, time

def make(name):
    with open("/dev/shm/" + name, "w+b") as file:
        file.truncate(4096)
        return mmap.mmap(file.fileno(), 4096)

child = os.fork()
memory = make(sys.argv[1] + ("" if child else "_child"))
time.sleep(60)
"""


@pytest.fixture
def segment() -> Iterator[str]:
    """Yield the name of a file in /dev/shm."""
    name = f"mpillm_test_{os.getpid()}"
    yield name
    for path in SHM.glob(f"{name}*"):
        path.unlink()


def made_by(name: str) -> list[str]:
    return sorted(path.name.removeprefix(name) for path in SHM.glob(f"{name}*"))


@pytest.mark.parametrize("whom", ["first", "child", "guard", "nobody"])
def test_shared_memory_of_what_was_killed(tmp_path: Path, segment: str, whom: str) -> None:
    """What is killed can't remove it, ready or not."""
    server = OwnedServer(Command((sys.executable, "-c", MAKES, segment)), tmp_path / "server.log")
    try:
        wait_until(lambda: len(server._shared) == 2, "both files")
        first, child = sorted(server.pids)
        if whom != "nobody":
            os.kill({"first": first, "child": child, "guard": server._guard.pid}[whom], signal.SIGKILL)
            wait_until(server.ended, "its end")
    finally:
        server.stop(1.0)
    assert not made_by(segment)


OWNER = """
import sys, time
from pathlib import Path
from launch.command import Command
from launch.owned_server import OwnedServer

server = OwnedServer(Command((sys.executable, "-c", sys.argv[1], sys.argv[2])), Path(sys.argv[3]), grace_s=1)
while len(server._shared) < 2:
    time.sleep(0.05)
print("both", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("ends", [subprocess.Popen.kill, lambda owner: end_processes(owner, set())])
def test_shared_memory_of_a_server_whose_owner_was_killed(
    tmp_path: Path, segment: str, ends: Callable[[subprocess.Popen[bytes]], None]
) -> None:
    """By whomever, or with all that is below it, as `mpillm mpirun` does."""
    words = [sys.executable, "-c", OWNER, MAKES, segment, str(tmp_path / "server.log")]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == b"both\n"
        ends(owner)
    wait_until(lambda: not made_by(segment), "their end")


def test_shared_memory_that_others_have(tmp_path: Path, segment: str) -> None:
    """What was there before, and what a process that is no part of the server has, too, stays."""
    (SHM / f"{segment}_child").write_bytes(bytes(4096))
    server = OwnedServer(Command((sys.executable, "-c", MAKES, segment)), tmp_path / "server.log")
    try:
        wait_until(lambda: server._shared == {segment}, "its file")
        with (SHM / segment).open("r+b") as file:
            ours = mmap.mmap(file.fileno(), 4096)
    finally:
        server.stop(1.0)
    assert made_by(segment) == ["", "_child"]
    ours.close()
