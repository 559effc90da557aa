"""Which pairs are measured, what is said of them, and ports that answer or don't."""

from __future__ import annotations

import itertools

import pytest

from mpillm.doctor.findings import Status, World
from mpillm.doctor.network import (
    HostFacts,
    KeyServer,
    LinkMeasurement,
    Reachability,
    clock_lines,
    host_facts,
    link_lines,
    namespaces,
    reach,
    reached_line,
    rounds,
)


@pytest.mark.parametrize("n", range(2, 9))
def test_few_nodes_measure_every_pair_once(n: int) -> None:
    nodes = list(range(0, 3 * n, 3))
    made = rounds(nodes)
    assert sorted(pair for pairs in made for pair in pairs) == list(itertools.combinations(nodes, 2))
    assert len(made) == n - 1 + n % 2


@pytest.mark.parametrize("n", [9, 10, 511, 512])
def test_many_nodes_measure_a_ring(n: int) -> None:
    made = rounds(range(n))
    pairs = [pair for some in made for pair in some]
    assert sorted(pairs) == sorted([(i, i + 1) for i in range(n - 1)] + [(0, n - 1)])
    assert len(made) <= 3


@pytest.mark.parametrize("n", [2, 5, 8, 9, 64])
def test_nobody_measures_twice_at_a_time(n: int) -> None:
    for pairs in rounds(range(n)):
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks)) and all(a < b for a, b in pairs)


def test_one_node_measures_nothing() -> None:
    assert rounds([0]) == []


WORLD = World({0: "a", 1: "a", 2: "b", 3: "c"})


def test_a_slow_pair_and_one_that_does_not_answer_are_named() -> None:
    good = LinkMeasurement(10e-6, 2e9, 0.0)
    lost = LinkMeasurement(0, 0, 0, "rank 3 did not answer in time")
    found = {(0, 2): good, (0, 3): good, (2, 3): good._replace(bytes_per_s=0.5e9)}
    (line,) = link_lines("MPI between nodes", found, WORLD)
    assert (line.status, "b-c" in line.text) == (Status.WARNING, True)
    assert [pair["nodes"] for pair in line.figures["pairs"]] == [["a", "b"], ["a", "c"], ["b", "c"]]
    _, failed = link_lines("MPI between nodes", found | {(2, 3): lost}, WORLD)
    assert (failed.status, failed.ranks) == (Status.FAILURE, (2, 3))
    assert "rank 3 did not answer" in failed.text


def test_clocks() -> None:
    apart = {2: LinkMeasurement(1e-5, 1e9, -0.001), 3: LinkMeasurement(1e-5, 1e9, 2.5)}
    (line,) = clock_lines(apart, WORLD)
    assert line.status is Status.WARNING and "2.5e+03 ms" in line.text and "c" in line.text
    (line,) = clock_lines({2: apart[2]}, WORLD)
    assert line.status is Status.OK and line.figures["offsets_s"] == {"b": -0.001}


def test_a_port_is_reached_at_its_own_addresses_only() -> None:
    listener = KeyServer()
    own = host_facts(listener)._replace(addresses=("127.0.0.1",))
    assert reach(own) == Reachability(("127.0.0.1",), ())
    (bad,) = reach(own._replace(key=b"0" * 16)).bad
    assert bad == "127.0.0.1 (somebody else answers there)"
    world = World({0: "a", 1: "b", 2: "c"})
    found = reached_line({1: Reachability((), (bad,)), 2: None}, world)
    assert [(line.status, line.ranks) for line in found] == [(Status.WARNING, (1,)), (Status.FAILURE, (2,))]


def test_ranks_of_a_node_in_different_network_namespaces() -> None:
    def facts(namespace: str) -> HostFacts:
        return HostFacts("a", "", (), 1, "", b"", namespace)

    world = World({0: "a", 1: "a"})
    assert namespaces({0: facts("x"), 1: facts("x")}, world) == []
    (line,) = namespaces({0: facts("x"), 1: facts("y")}, world)
    assert line.status is Status.WARNING
