"""A whole host is lost, or the daemon through which mpirun reaches it (make test-hosts, as root)."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.test_instance_loss import OUTPUT, TEST, check_answers, check_told, wait_for_answers
from tests.e2e.test_kills_in_phases import EXECUTORS, TIMES
from tests.helpers.clusters import OnHosts, or_skip, python_on
from tests.helpers.held_cores import GO, HELD, HOLD
from tests.helpers.support import (
    DONE,
    INSTANCE_LOST,
    NOT_READY,
    Command,
    Ended,
    Samples,
    Starter,
    make_samples,
    wait_until,
)
from tools.hosts import Hosts, hosts

pytestmark = pytest.mark.hosts

WITHIN_S = 120.0  # hosts that share two cores start slowly
LOST = "h2"
WHERE = "h1:2,h2:2,h3:2"  # harness and leader, and two executors on each of the others


@pytest.fixture
def on_hosts(one: Starter) -> Iterator[OnHosts]:
    """Make three hosts for one test, which may end them."""
    with or_skip(hosts(3)) as made:
        yield OnHosts(made, one)


@pytest.fixture
def few(tmp_path: Path) -> Samples:
    return make_samples(tmp_path / "few.jsonl", [1 + 37 * i % 293 for i in range(64)])


def _kill_ranks(made: Hosts) -> None:
    for pid in python_on(made, LOST, "run"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _kill_daemon(made: Hosts) -> None:
    for pid in made.processes(LOST):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # one that has ended meanwhile
            if Path(f"/proc/{pid}/comm").read_text().strip() == "prted":
                os.kill(pid, signal.SIGKILL)


HITS: dict[str, Callable[[Hosts], None]] = {
    "its ranks": _kill_ranks,
    "its daemon": _kill_daemon,
    "its power": lambda made: made.cut_power(LOST),
}


def _wait(command: Command, on: Hosts, phase: str) -> None:
    if phase == "join":
        wait_until(
            lambda: len(python_on(on, LOST, "run")) == 2 or command.process.poll() is not None,
            f"ranks on {LOST}",
            WITHIN_S,
        )
    elif phase == "test":
        wait_for_answers(command, 8)
        return
    else:
        before = {"load": "join", "warmup": "health", "drain": "test", "stop": "drain", "end": "page"}[phase]
        wait_until(
            lambda: f"\n  {before} " in command.out or command.process.poll() is not None,
            f"phase {phase}",
            WITHIN_S,
        )
    assert command.process.poll() is None, repr(command.end())


def _words(few: Samples, policy: str) -> list[object]:
    words = ["run", "--dataset_path", few.path, *TEST, *EXECUTORS, "--control_ranks", 2]
    words += ["--heartbeat_timeout", 10, "--grace", 3]
    return [*words, "--on_instance_loss", policy]


def _check_that_none_is_left(ended: Ended, on: Hosts, hit: str) -> None:
    assert "Traceback" not in ended.err, ended
    left = ("h1", "h3") if hit == "its power" else ("h1", LOST, "h3")
    wait_until(lambda: not any(python_on(on, host, "run") for host in left), "the end of all ranks")


@pytest.mark.parametrize("policy", ["fail", "continue"])
@pytest.mark.parametrize("phase", ["join", "load", "warmup", "test"])
@pytest.mark.parametrize("hit", HITS)
def test_a_host_is_lost(on_hosts: OnHosts, few: Samples, hit: str, phase: str, policy: str) -> None:
    """The run ends, says so, and leaves nothing; or it goes on, which Open MPI's mpirun allows as long as its
    daemons are all there. A rank of the last host keeps load and warm-up from ending."""
    hang = f",fault:hang,fault_phase:{phase},fault_rank:5" if phase in ("load", "warmup") else ""
    words = [*_words(few, policy), "--core_type", "dummy", "--join_deadline", 20]
    command = on_hosts.start(WHERE, *words, "--core_options", TIMES + hang)
    _wait(command, on_hosts.hosts, phase)
    HITS[hit](on_hosts.hosts)
    # Ranks without a daemon that are inside MPI_Init end by themselves, some time after the deadline.
    ended = command.end(WITHIN_S, lingers=WITHIN_S if (hit, phase) == ("its daemon", "join") else 3.0)
    _check_that_none_is_left(ended, on_hosts.hosts, hit)
    if phase == "join":  # MPI may or may not have started
        assert ended.code in (NOT_READY, INSTANCE_LOST, 128 + signal.SIGTERM), ended
        assert "MPI_Init" in ended.err or LOST in ended.err + ended.out, ended
        return
    if hit == "its ranks" and phase == "test" and policy == "continue":
        check_answers(ended, [few.answer(i, OUTPUT) for i in range(64)])
        check_told(ended, [0, 1])
        return
    assert ended.result["status"] == "FAILED", ended
    if hit == "its ranks":
        ended.must(INSTANCE_LOST)
        assert {failure["rank"] for failure in ended.result["failures"]} <= {2, 3}, ended
    else:  # mpirun tells which host it has lost, and ends the other ranks, at times before rank 0 knows
        assert ended.code in (INSTANCE_LOST, 128 + signal.SIGTERM), ended


@pytest.mark.parametrize("policy", ["fail", "continue"])
@pytest.mark.parametrize("phase", ["drain", "stop", "end"])
@pytest.mark.parametrize("hit", HITS)
def test_a_host_is_lost_after_the_test(
    on_hosts: OnHosts, few: Samples, hit: str, phase: str, policy: str
) -> None:
    """As above; LoadGen's verdict is told in any case. A rank of the last host holds the phase."""
    hold = {HOLD: f"{'finalize' if phase == 'end' else phase}:5"}
    command = on_hosts.start(WHERE, *_words(few, policy), "--core_type", HELD, exports=hold)
    _wait(command, on_hosts.hosts, phase)
    HITS[hit](on_hosts.hosts)
    goes_on = hit == "its ranks" and policy == "continue"
    if goes_on and phase != "end":
        wait_until(
            lambda: command.out.count("\n  lost ") == 2 or command.process.poll() is not None, "both losses"
        )
    if goes_on or phase == "end":
        (on_hosts.starter.folder / GO).touch()
    ended = command.end(WITHIN_S)
    _check_that_none_is_left(ended, on_hosts.hosts, hit)
    assert ended.result["loadgen_result"] == "VALID", ended
    if phase == "end":  # all is done, and the result is written
        assert ended.must(DONE).result["status"] == "VALID"
    elif goes_on:
        check_answers(ended, [few.answer(i, OUTPUT) for i in range(64)])
        check_told(ended, [0, 1])
    else:
        assert (ended.result["status"], ended.result["phase"]) == ("FAILED", phase), ended
        assert ended.code in (INSTANCE_LOST, 128 + signal.SIGTERM), ended
        if hit == "its ranks":
            assert {failure["rank"] for failure in ended.result["failures"]} <= {2, 3}, ended
        assert LOST in ended.err, ended  # in mpirun's words, or in ours
