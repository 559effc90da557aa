"""The simulated cluster: its real leader and control do what they do in a run, with few operations."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from benchmarks import scale
from benchmarks.simulated_cluster import ControlledCluster, RoutedCluster, plan_of
from mpillm.comms.watch import beat_interval_s
from mpillm.options.command_line import Parser
from mpillm.options.fields import AllFields
from mpillm.options.values import collect
from mpillm.phases import PHASES

N = 100


def ready_cluster() -> ControlledCluster:
    cluster = ControlledCluster(plan_of(N), {}, 30.0)
    for phase in PHASES[: PHASES.index("test")]:
        assert cluster.arrive(phase) > 0
    assert cluster.control.phase == "test"
    return cluster


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    config = collect(["--instances", "4,8"], scale.Options, Parser(prog="benchmarks scale"))
    assert scale.main(config) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-2:] for line in lines if line.startswith("  ranks ")] == [["10", "18"]]


@pytest.mark.parametrize("policy", AllFields.traffic_distribution_policy.choices)
def test_every_request_is_sent_on_and_answered(policy: str) -> None:
    cluster = RoutedCluster(plan_of(N), policy)
    assert set(cluster.leader.outstanding_by_instance().values()) == {8}
    cluster.ask(100)
    cluster.answer(8 * N + 100)
    assert set(cluster.leader.outstanding_by_instance().values()) == {0}


def test_losses_are_noticed() -> None:
    """A process that ends is known at the next look, a silent rank after the heartbeat timeout."""
    assert ready_cluster().notices(7, 0.5, ended=True) == pytest.approx(0.1)
    assert 30 < ready_cluster().notices(7, 0.5, ended=False) < 31


def test_a_message_to_all_ranks_is_written_once() -> None:
    assert ready_cluster().n_written == PHASES.index("test")


def test_control_looks_at_every_rank_only_when_one_can_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = ready_cluster()
    look = Mock(wraps=cluster.control._is_expected)
    monkeypatch.setattr(cluster.control, "_is_expected", look)
    # Rank 0 looks 250 times, twice at the processes of its own node, and every 0.5 s whether one is stopped.
    cluster.live(25.0, 0.5)
    n_ranks, n_on_its_node = len(cluster.control.ranks), 8
    assert n_ranks > 4 * n_on_its_node
    assert look.call_count <= n_ranks + (2 * 260 + 60) * n_on_its_node


@pytest.mark.parametrize(("ranks", "seconds"), [(1, 0.5), (512, 0.5), (1024, 1.0), (8194, 8.0)])
def test_heartbeats_of_many_ranks_are_rarer(ranks: int, seconds: float) -> None:
    assert beat_interval_s(ranks) == seconds
