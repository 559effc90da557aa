"""A whole host is lost, the daemon through which mpirun reaches it, or mpirun (make test-hosts, as root)."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable, Iterator

import pytest

from tests.helpers.answers import check_answers, wait_for_answers
from tests.helpers.clusters import THREE_HOSTS, OnHosts, kill_named, or_skip, python_on, signal_rank_on
from tests.helpers.holds import GO, HELD, HOLD
from tests.helpers.instance_loss import OUTPUT, TIMES, check_losses, run_words
from tests.helpers.support import (
    DONE,
    INSTANCE_LOST,
    NOT_READY,
    Command,
    Ended,
    Samples,
    Starter,
    wait_until,
)
from tools.hosts import HEAD, Hosts, hosts

pytestmark = pytest.mark.hosts

WITHIN_S = 120.0  # hosts that share two cores start slowly
LOST = "h2"


@pytest.fixture
def three_hosts() -> Iterator[Hosts]:
    """Make three hosts for one test, which may end them."""
    with or_skip(hosts(3)) as made:
        yield made


@pytest.fixture
def on_hosts(three_hosts: Hosts, one: Starter) -> OnHosts:
    return OnHosts(three_hosts, one)


def _kill_ranks(made: Hosts) -> None:
    for pid in python_on(made, LOST, "run"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _kill_daemon(made: Hosts) -> None:
    kill_named(made, LOST, "prted")


def _kill_mpirun(made: Hosts) -> None:
    """It is on `head`, below the process that `mpillm mpirun` is there."""
    kill_named(made, HEAD, "prterun", "mpirun")


HITS: dict[str, Callable[[Hosts], None]] = {
    "its ranks": _kill_ranks,
    "its daemon": _kill_daemon,
    "its power": lambda made: made.cut_power(LOST),
    "mpirun": _kill_mpirun,
}


def check_cause(ended: Ended, hit: str) -> None:
    """The launcher says what it saw, whatever rank 0 has made of it: also in the result, and on a page."""
    ended.must(INSTANCE_LOST)
    result = ended.result
    assert (result["status"], result["exit_code"]) == ("FAILED", INSTANCE_LOST), ended
    if hit == "mpirun":
        cause = r"mpirun \(pid \d+\) was ended by signal 9 \(SIGKILL\), and so were all ranks"
    else:
        cause = rf"host {LOST} \(ranks 2-3\): mpirun has lost its daemon on {LOST}"
    (failure,) = result["failures"]
    assert failure["rank"] is None and re.match(cause, failure["cause"]), ended
    assert re.search(f"^mpillm mpirun: failed in phase '{result['phase']}': {cause}", ended.err, re.M), ended
    assert failure["cause"] in (ended.log_dir / "report.html").read_text()


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


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"], indirect=True)
def test_the_next_start_sweeps_what_killed_ranks_left(
    three_hosts: Hosts, both: Starter, few: Samples
) -> None:
    """On each host, of ours only: here another program's segment lies there, too."""
    on = OnHosts(three_hosts, both)
    three_hosts.run(LOST, "touch", "/dev/shm/mpich_shm_1234_0")
    command = on.start(THREE_HOSTS, *run_words(few, "fail"), "--core_type", "dummy", "--core_options", TIMES)
    _wait(command, three_hosts, "test")
    for host in three_hosts.names:
        for pid in python_on(three_hosts, host, "run"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    command.end(WITHIN_S)

    def left() -> dict[str, set[str]]:
        find = ("find", "/dev/shm", "-type", "f", "-name", "*_s*m*_*", "-printf", "%f\\n")
        return {host: {*three_hosts.run(host, *find).split()} for host in three_hosts.names}

    assert any(re.match("mpich_shm|sm_segment", name) for names in left().values() for name in names)
    on.start(THREE_HOSTS, *run_words(few, "fail"), "--core_type", "dummy").end(WITHIN_S).must(DONE)
    assert left() == {"h1": set(), LOST: {"mpich_shm_1234_0"}, "h3": set()}


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
    words = [*run_words(few, policy), "--core_type", "dummy", "--join_deadline", 20]
    command = on_hosts.start(THREE_HOSTS, *words, "--core_options", TIMES + hang)
    _wait(command, on_hosts.hosts, phase)
    HITS[hit](on_hosts.hosts)
    # Ranks without a daemon that are inside MPI_Init end by themselves, some time after the deadline.
    ended = command.end(WITHIN_S, lingers=WITHIN_S if (hit, phase) == ("its daemon", "join") else 3.0)
    _check_that_none_is_left(ended, on_hosts.hosts, hit)
    if phase == "join":  # MPI may or may not have started
        assert ended.code in (NOT_READY, INSTANCE_LOST, 128 + signal.SIGTERM), ended
        assert "MPI_Init" in ended.err or LOST in ended.err + ended.out or hit == "mpirun", ended
        assert "rank 0 ended" not in ended.err, ended
        return
    if hit == "its ranks" and phase == "test" and policy == "continue":
        check_answers(ended, [few.answer(i, OUTPUT) for i in range(64)])
        check_losses(ended, [0, 1])
        return
    if hit == "its ranks":
        assert ended.must(INSTANCE_LOST).result["status"] == "FAILED", ended
        assert {failure["rank"] for failure in ended.result["failures"]} <= {2, 3}, ended
        assert (ended.log_dir / "report.html").exists()
    else:  # mpirun ends the other ranks, at times before rank 0 knows
        check_cause(ended, hit)


@pytest.mark.parametrize("mpi", ["mpich"], indirect=True)
@pytest.mark.parametrize("phase", ["warmup", "test"])
@pytest.mark.parametrize("hit", ["its power", "mpirun"])
def test_mpichs_mpirun_leaves_rank_0_no_time(
    three_hosts: Hosts, both: Starter, few: Samples, hit: str, phase: str
) -> None:
    hang = f",fault:hang,fault_phase:{phase},fault_rank:5" if phase == "warmup" else ""
    on = OnHosts(three_hosts, both)
    command = on.start(
        THREE_HOSTS, *run_words(few, "fail"), "--core_type", "dummy", "--core_options", TIMES + hang
    )
    _wait(command, three_hosts, phase)
    HITS[hit](three_hosts)
    ended = command.end(WITHIN_S)
    _check_that_none_is_left(ended, three_hosts, hit)
    if hit == "mpirun":
        check_cause(ended, hit)
        return
    # Nothing tells mpirun of the host: rank 0 hears no heartbeat, and has the time to say so.
    assert {failure["rank"] for failure in ended.must(INSTANCE_LOST).result["failures"]} == {2, 3}, ended
    assert f"host {LOST} (ranks 2-3): no heartbeat" in ended.message
    assert (ended.log_dir / "report.html").exists()


@pytest.mark.parametrize("victim", [0, 2])
def test_rank_0_is_blamed_only_where_it_was_killed(on_hosts: OnHosts, few: Samples, victim: int) -> None:
    command = on_hosts.start(
        THREE_HOSTS, *run_words(few, "fail"), "--core_type", "dummy", "--core_options", TIMES
    )
    _wait(command, on_hosts.hosts, "test")
    signal_rank_on(on_hosts.hosts, victim)
    ended = command.end(WITHIN_S).must(INSTANCE_LOST)
    assert [failure["rank"] for failure in ended.result["failures"]] == [victim], ended
    assert ("rank 0 on h1 ended without an exit code" in ended.err) == (victim == 0), ended
    assert (ended.log_dir / "report.html").exists()


@pytest.mark.parametrize("policy", ["fail", "continue"])
@pytest.mark.parametrize("phase", ["drain", "stop", "end"])
@pytest.mark.parametrize("hit", HITS)
def test_a_host_is_lost_after_the_test(
    on_hosts: OnHosts, few: Samples, hit: str, phase: str, policy: str
) -> None:
    """As above; LoadGen's verdict is told in any case. A rank of the last host holds the phase."""
    hold = {HOLD: f"{'finalize' if phase == 'end' else phase}:5"}
    command = on_hosts.start(THREE_HOSTS, *run_words(few, policy), "--core_type", HELD, exports=hold)
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
        check_losses(ended, [0, 1])
    else:
        assert (ended.result["status"], ended.result["phase"]) == ("FAILED", phase), ended
        if hit == "its ranks":
            assert {failure["rank"] for failure in ended.must(INSTANCE_LOST).result["failures"]} <= {2, 3}
            assert LOST in ended.err, ended
        else:
            check_cause(ended, hit)
