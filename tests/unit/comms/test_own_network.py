"""The loss of rank 0's own network, which would look like the loss of all others."""

from __future__ import annotations

import os

import pytest

from benchmarks.simulated_cluster import ControlledCluster, plan_of
from mpillm.comms.own_network import own_network_lost
from mpillm.errors import ExitCode, RunError

HOSTS = {0: "h1", 1: "h1", 2: "h2", 3: "h2", 4: "h3", 5: "h3"}


@pytest.mark.parametrize(
    ("expected", "silent", "is_lost", "has_link"),
    [
        (range(6), {2, 3, 4, 5}, True, True),
        ([0, 1, 2, 4], {2, 4}, True, True),  # the others have ended
        (range(6), {2, 3, 4}, False, False),  # rank 5 beats
        (range(6), {1, 2, 3, 4, 5}, False, False),  # a rank here is silent: its network is not the reason
        (range(6), {1}, False, False),
        ([0, 1, 2, 3], {2, 3}, False, True),  # one other host: its network or this one's
        ([0, 1, 2, 3], {2, 3}, True, False),
        (range(6), set(), False, False),
        ([0, 1], set(), False, False),
    ],
)
def test_all_other_hosts_are_silent(
    expected: range | list[int], silent: set[int], is_lost: bool, has_link: bool
) -> None:
    cause = own_network_lost(HOSTS, expected, silent, lambda: has_link)
    assert cause.startswith("host h1 has lost its network: ") == is_lost
    assert bool(cause) == is_lost


@pytest.mark.parametrize("is_own", [True, False])
def test_rank_0_blames_its_own_host(is_own: bool) -> None:
    cluster = ControlledCluster(plan_of(4), {}, heartbeat_s=60.0)
    cluster.arrive("join")
    control = cluster.control
    silent = range(1 if is_own else 2, len(control.ranks))
    for rank, state in enumerate(control.ranks):
        state.host, state.pid = f"h{rank}", os.getpid()
        if rank in silent:
            state.last_message_at -= 120
    control.check_soon()
    with pytest.raises(RunError) as error:
        control.poll()
    failures = control.settle(error.value.failures)
    assert [failure.rank for failure in failures] == ([0] if is_own else [*silent])
    assert {failure.code for failure in failures} == {ExitCode.INSTANCE_LOST}
    assert failures[0].cause.startswith("host h0 has lost its network: ") == is_own
