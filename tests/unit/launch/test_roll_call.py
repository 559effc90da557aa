"""The roll call: who ended before all had joined, and who only because of that."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from launch.callers import unreached
from launch.exits import RankExit
from launch.roll_call import ROLL_CALL, RollCall
from tests.helpers.support import ROOT, wait_until

RANK = """
import sys
from launch import roll_call
roll_call.answer()
print("here", flush=True)
if words := sys.stdin.readline().split():
    getattr(roll_call, words[0])(*map(bool, words[1:]))
    print("done", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def roll_call() -> RollCall:
    return RollCall(3)


@pytest.fixture
def ranks(roll_call: RollCall) -> Iterator[list[subprocess.Popen[str]]]:
    """Yield the processes of three ranks, all of which have answered."""
    env = os.environ | {ROLL_CALL: roll_call.address, "OMPI_COMM_WORLD_SIZE": "3", "PYTHONPATH": str(ROOT)}
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
    wait_until(lambda: not roll_call.absent(), "all ranks")
    yield made
    for process in made:
        process.kill()
        process.communicate()


def ranks_of(exits: list[RankExit]) -> list[int]:
    return sorted(one.rank for one in exits)


def end(process: subprocess.Popen[str], word: str = "") -> None:
    process.communicate(word)


def test_only_who_ended_first_is_named(
    roll_call: RollCall, ranks: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some seconds: rank 0 may report why. If that has ended, too, nobody will."""
    end(ranks[2])
    wait_until(roll_call.first, "rank 2's end")
    time.sleep(0.01)
    end(ranks[1])
    assert ranks_of(roll_call.first()) == [2] and roll_call.lost() == []
    end(ranks[0])
    wait_until(roll_call.lost, "rank 0's end")
    assert [one[:3] for one in roll_call.lost()] == [(2, os.uname().nodename, ranks[2].pid)]
    assert roll_call.first() == roll_call.lost()


def test_who_has_joined_or_left_is_not_missed(
    roll_call: RollCall, ranks: list[subprocess.Popen[str]]
) -> None:
    end(ranks[0], "joined\n")
    end(ranks[1], "leaves\n")
    end(ranks[2])
    wait_until(roll_call.first, "rank 2's end")
    assert ranks_of(roll_call.first()) == [2]


@pytest.mark.parametrize("first", [0, 1])
def test_who_ended_before_rank_0(roll_call: RollCall, ranks: list[subprocess.Popen[str]], first: int) -> None:
    end(ranks[2], "leaves\n")
    for rank in (first, 1 - first):
        end(ranks[rank], "joined\n")
        time.sleep(0.05)
    wait_until(lambda: roll_call.before_rank_0() or first == 0, "rank 0's end")
    time.sleep(0.05)
    assert ranks_of(roll_call.before_rank_0()) == ([1] if first == 1 else [])
    assert roll_call.lost() == roll_call.first() == []
    assert roll_call.hosts() == dict.fromkeys(range(3), os.uname().nodename)


def test_who_has_started_but_does_not_reach_the_launcher(roll_call: RollCall) -> None:
    assert not roll_call.note_cut_off("rank 1 prints this\n")
    assert roll_call.absent() == ""
    assert roll_call.note_cut_off("\x1b_mpillm-here:1 h2\x1b\\\n")
    said = roll_call.absent()
    assert said.startswith("rank 0, rank 2 has not started, or was lost before that; rank 1")
    assert "has started, but can't reach `mpillm mpirun` at " in said and "firewall" in said
    assert roll_call.ports() == [] and not roll_call.waits()


def test_where_ranks_listen(roll_call: RollCall, ranks: list[subprocess.Popen[str]]) -> None:
    assert roll_call.waits()
    assert [(one.rank, one.host) for one in roll_call.ports()] == [(i, os.uname().nodename) for i in range(3)]
    assert unreached({one.rank: (one.address, one.port) for one in roll_call.ports()}) == {}
    for process in ranks:
        end(process, "joined\n")
    wait_until(lambda: not roll_call.waits(), "all to have joined")


def test_who_leaves_because_another_is_missing_can_still_be_reached(
    roll_call: RollCall, ranks: list[subprocess.Popen[str]]
) -> None:
    """The launcher may look for it only now, and a port that nobody has would seem a firewall's work."""
    (process, *_) = ranks
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("leaves still_listens\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"
    (port,) = (one for one in roll_call.ports() if one.rank == 0)
    assert unreached({0: (port.address, port.port)}) == {}
