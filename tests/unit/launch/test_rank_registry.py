"""The rank registry: ranks that exited before all had joined, and ranks that exited because of that."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from launch.exits import RankExit
from launch.liveness_server import unreachable
from launch.rank_registry import REGISTRY_ADDRESS, RankRegistry
from tests.helpers.descriptors import soft_limit
from tests.helpers.support import ROOT, wait_until

RANK = """
import sys
from launch import rank_registry
rank_registry.register()
print("here", flush=True)
if words := sys.stdin.readline().split():
    getattr(rank_registry, words[0])(*map(bool, words[1:]))
    print("done", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def registry() -> RankRegistry:
    return RankRegistry(3)


@pytest.fixture
def ranks(registry: RankRegistry) -> Iterator[list[subprocess.Popen[str]]]:
    """Yield the processes of three ranks, all of which have registered."""
    env = os.environ | {
        REGISTRY_ADDRESS: registry.address,
        "OMPI_COMM_WORLD_SIZE": "3",
        "PYTHONPATH": str(ROOT),
    }
    made = [
        subprocess.Popen(
            [sys.executable, "-c", RANK],
            env=env | {"OMPI_COMM_WORLD_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    assert [process.stdout and process.stdout.readline() for process in made] == ["here\n"] * 3
    wait_until(lambda: len(registry.hosts()) == 3, "all ranks")
    yield made
    for process in made:
        process.kill()
        process.communicate()


def ranks_of(exits: list[RankExit]) -> list[int]:
    return sorted(one.rank for one in exits)


def end(process: subprocess.Popen[str], word: str = "") -> None:
    process.communicate(word)


def test_only_who_ended_first_is_named(
    registry: RankRegistry, ranks: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some seconds: rank 0 may report why. If that has ended, too, nobody will."""
    end(ranks[2])
    wait_until(registry.first_exits, "rank 2's end")
    time.sleep(0.01)
    end(ranks[1])
    assert ranks_of(registry.first_exits()) == [2] and registry.lost() == []
    end(ranks[0])
    wait_until(registry.lost, "rank 0's end")
    assert [one[:3] for one in registry.lost()] == [(2, os.uname().nodename, ranks[2].pid)]
    assert registry.first_exits() == registry.lost()


def test_who_has_joined_or_left_is_not_missed(
    registry: RankRegistry, ranks: list[subprocess.Popen[str]]
) -> None:
    end(ranks[0], "report_joined\n")
    end(ranks[1], "deregister\n")
    end(ranks[2])
    wait_until(registry.first_exits, "rank 2's end")
    assert ranks_of(registry.first_exits()) == [2]


@pytest.mark.parametrize("first", [0, 1])
def test_who_ended_before_rank_0(
    registry: RankRegistry, ranks: list[subprocess.Popen[str]], first: int
) -> None:
    end(ranks[2], "deregister\n")
    for rank in (first, 1 - first):
        end(ranks[rank], "report_joined\n")
        time.sleep(0.05)
    wait_until(lambda: registry.exits_before_rank_0() or first == 0, "rank 0's end")
    time.sleep(0.05)
    assert ranks_of(registry.exits_before_rank_0()) == ([1] if first == 1 else [])
    assert registry.lost() == registry.first_exits() == []
    assert registry.hosts() == dict.fromkeys(range(3), os.uname().nodename)


def test_a_rank_that_has_started_but_does_not_reach_the_launcher(registry: RankRegistry) -> None:
    assert not registry.note_cut_off("rank 1 prints this\n")
    assert registry.absent() == ""
    assert registry.note_cut_off("\x1b_mpillm-here:1 h2\x1b\\\n")
    message = registry.absent()
    assert message.startswith("rank 0, rank 2 has not started, or was lost before that; rank 1")
    assert "has started, but can't reach `mpillm mpirun` at " in message and "firewall" in message
    assert registry.ports() == [] and not registry.waits()


def test_ranks_that_the_launcher_has_no_open_files_for(registry: RankRegistry) -> None:
    """They must not be named as ranks that have not started."""
    registry.note_cut_off("\x1b_mpillm-here:1 h2\x1b\\\n")
    with socket.socket() as client:
        os.close(free := os.dup(client.fileno()))
        with soft_limit(free):
            client.connect(("127.0.0.1", int(registry.address.split("/")[1])))
            cause = wait_until(lambda: "ulimit -n" in (message := registry.absent()) and message, "the cause")
    assert cause.startswith(
        f"rank 0, rank 2 cannot register: `mpillm mpirun` may open only {free} files: ulimit -n "
    )


def test_where_ranks_listen(registry: RankRegistry, ranks: list[subprocess.Popen[str]]) -> None:
    assert registry.waits()
    assert [(one.rank, one.host) for one in registry.ports()] == [(i, os.uname().nodename) for i in range(3)]
    assert unreachable({one.rank: (one.address, one.port) for one in registry.ports()}) == {}
    for process in ranks:
        end(process, "report_joined\n")
    wait_until(lambda: not registry.waits(), "all to have joined")


def test_who_leaves_because_another_is_missing_can_still_be_reached(
    registry: RankRegistry, ranks: list[subprocess.Popen[str]]
) -> None:
    """The launcher may look for it only now, and a port that nobody has would seem a firewall's work."""
    (process, *_) = ranks
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("deregister keep_port\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"
    (port,) = (one for one in registry.ports() if one.rank == 0)
    assert unreachable({0: (port.address, port.port)}) == {}
