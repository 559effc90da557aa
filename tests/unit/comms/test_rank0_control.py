"""Rank 0's control: which failures it believes."""

from __future__ import annotations

import re

import pytest

from benchmarks.simulated_cluster import ControlledCluster, plan_of
from mpillm.comms import messages, rank0_control
from mpillm.comms.messages import Beat, StoppedRank
from mpillm.comms.transport import Envelope
from mpillm.errors import Failure, RunError
from mpillm.phases import PHASES, Phase

BEATS_S = 0.5
STOPPED = 3


@pytest.mark.parametrize("both_reported", [True, False], ids=["both", "one first"])
def test_who_waits_for_a_stopped_rank_is_not_blamed(both_reported: bool) -> None:
    """The leader reports instances that send nothing; one whose ranks all beat may wait for the other.

    For the instance with the stopped rank, that rank is named, not the root rank.
    """
    plan = plan_of(4)
    cluster = ControlledCluster(plan, {}, heartbeat_s=60.0)
    cluster.arrive("join")
    cluster.live(5.0, BEATS_S)
    cluster.live(10.0, BEATS_S, without=STOPPED)
    guilty, waiting = (plan.ranks[STOPPED].instance, plan.instances[3].index)
    assert guilty is not None and guilty != waiting
    cluster.tell(1, Failure("sent nothing", plan.instances[waiting].root_rank))
    if not both_reported:
        cluster.live(2.0, BEATS_S, without=STOPPED)
    cluster.tell(1, Failure("sent nothing", plan.instances[guilty].root_rank))
    with pytest.raises(RunError) as error:
        cluster.live(2.0, BEATS_S, without=STOPPED)
    (failure,) = error.value.failures
    assert failure.rank == STOPPED != plan.instances[guilty].root_rank
    assert re.fullmatch(r"no heartbeat for 1[0-9] s; sent nothing", failure.cause)


@pytest.mark.parametrize("continues", [False, True])
def test_a_silent_rank_of_another_host_was_reported_as_stopped(continues: bool) -> None:
    """Its host's lowest rank that runs has seen it. A heartbeat means that it has continued."""
    cluster = ControlledCluster(plan_of(8), {}, heartbeat_s=10.0)
    cluster.arrive("join")
    control, rank, how = cluster.control, 17, "is stopped: kill -CONT 7"
    message = messages.STOPPED
    sent = Envelope(16, message.tag, message.write(StoppedRank(rank, how)))
    control._transport.handlers[message.tag](sent)
    if continues:
        cluster.live(1.0, BEATS_S)
    with pytest.raises(RunError) as error:
        cluster.live(12.0, BEATS_S, without=rank)
    (failure,) = error.value.failures
    assert failure.rank == rank
    assert (how in failure.cause) == (not continues)


def test_an_instance_that_is_silent_while_all_ranks_beat_is_blamed() -> None:
    plan = plan_of(4)
    cluster = ControlledCluster(plan, {}, heartbeat_s=60.0)
    cluster.arrive("join")
    cluster.live(5.0, BEATS_S)
    cluster.tell(1, Failure("sent nothing", plan.instances[2].root_rank))
    with pytest.raises(RunError) as error:
        cluster.live(2.0, BEATS_S)
    assert [failure.rank for failure in error.value.failures] == [plan.instances[2].root_rank]


def test_no_phase_ends_once_a_failure_ends_the_run() -> None:
    """On a full disk, an arrival that came while failures settled began the work that had failed again."""
    cluster = ControlledCluster(plan_of(4), {}, heartbeat_s=1e9)
    cluster.arrive("join")
    failure = Failure("no space left on device", 0)
    assert cluster.control.settle((failure,)) == (failure,)
    assert cluster.arrive("load") == 0, "nobody is released"


def test_a_failure_that_may_follow_another_is_reported_only_alone() -> None:
    """The other part of a server exits by itself, and may be reported first."""
    follows, cause = Failure("ended with exit code 1", 2, may_follow=True), Failure("was ended by SIGKILL", 1)
    cluster = ControlledCluster(plan_of(4), {}, heartbeat_s=1e9)
    assert cluster.control.settle((follows,)) == (follows,)
    assert cluster.control.settle((follows, cause)) == (cause,)


@pytest.mark.parametrize("seen", [True, False])
def test_an_observed_cause_is_reported_immediately(seen: bool) -> None:
    """Only without an observed cause does rank 0 wait for other failures."""
    cluster = ControlledCluster(plan_of(4), {}, heartbeat_s=1e9)
    cluster.arrive("join")
    failure = Failure("a server's process was killed", 2, seen=seen)
    cluster.tell(2, failure)
    step_s = rank0_control._SETTLE_S / 5
    if not seen:
        cluster.live(3 * step_s, step_s)
    with pytest.raises(RunError):
        cluster.live(2 * step_s if seen else 2.0, step_s)
    assert cluster.control._settle_time_s((failure,)) == (0 if seen else rank0_control._SETTLE_S)


@pytest.mark.parametrize("phase", PHASES[-2:])
def test_only_a_rank_that_was_released_from_the_last_phase_may_end(phase: Phase) -> None:
    """After a loss no rank waits for rank 0 in MPI_Finalize: it may be gone before rank 0 looks again."""
    cluster = ControlledCluster(plan_of(4), {}, heartbeat_s=60.0)
    for before in PHASES[: PHASES.index(phase) + 1]:
        cluster.arrive(before)
    cluster.end(5)
    if phase == PHASES[-1]:  # and what the others make of its end, before they leave, changes nothing
        cluster.tell(1, Failure("MPI: process failure", 1))
        cluster.live(2.0, BEATS_S)
        return
    with pytest.raises(RunError) as error:
        cluster.live(2.0, BEATS_S)
    assert [failure.rank for failure in error.value.failures] == [5]


def test_a_beat_after_rank_0_was_busy_is_not_from_the_future() -> None:
    """Beats may be read before the time that rank 0 was busy is added."""
    cluster = ControlledCluster(plan_of(4), {}, heartbeat_s=10.0)
    cluster.arrive("join")
    cluster.live(5.0, BEATS_S)
    cluster.clock.now += 300.0
    cluster.live(1.0, BEATS_S)
    assert cluster.notices(STOPPED, BEATS_S, ended=False) < 15


def test_a_missed_deadline_includes_the_state_of_the_rank() -> None:
    """Its deadline may pass before the rank's own, which names the server. The stack adds nothing."""
    cluster = ControlledCluster(plan_of(4), {}, heartbeat_s=1e9)
    cluster.arrive("join")
    state = cluster.control.ranks[STOPPED]
    stack = "  File core.py, line 1, in load"
    cluster.control._on_beat(STOPPED, Beat("load", 9.0, stack, None, "waiting for http://a:1: refused\nmore"))
    (failure,) = [one for one in cluster.control._deadline_failures(60.0) if one.rank == STOPPED]
    assert failure.cause == (
        "phase 'load' missed its deadline of 60 s (--load_deadline); waiting for http://a:1: refused"
    )
    assert stack in state.last_seen()
