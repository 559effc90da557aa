"""The world plan: roles, coordinates, devices, and TP groups on as few nodes as possible."""

from __future__ import annotations

import json
import pickle
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from disagg import ConfigError, DisaggConfig, WorldPlan, from_mapping, generate, parse_nodes, plan


def section(instances: int, tp: int = 1, pp: int = 1, **more: int) -> dict[str, int]:
    return {"num_instances": instances, "tensor_parallel_size": tp, "pipeline_parallel_size": pp, **more}


def config(**sections: Any) -> DisaggConfig:
    return from_mapping(sections, "test")


def test_harness_and_leader_have_ranks_of_their_own() -> None:
    world = plan(generate("disaggregated", 5, control_ranks=2), 5)
    assert [rank.roles for rank in world.ranks] == [("harness",), ("leader",), ("ctx",), ("gen",), ("gen",)]
    assert (world.world_size, world.harness_rank, world.leader_rank) == (5, 0, 1)
    assert [(i.index, i.role, i.ranks, i.root_rank) for i in world.instances] == [
        (0, "ctx", (2,), 2),
        (1, "gen", (3,), 3),
        (2, "gen", (4,), 4),
    ]
    assert [rank.device for rank in world.ranks] == [None, None, 0, 1, 2]


def test_harness_and_leader_share_a_rank() -> None:
    world = plan(generate("disaggregated", 4), 4)
    assert [rank.roles for rank in world.ranks] == [("harness", "leader"), ("ctx",), ("gen",), ("gen",)]
    assert (world.harness_rank, world.leader_rank) == (0, 0)


def test_one_rank_has_every_role_and_a_device() -> None:
    world = plan(generate("aggregated", 1), 1)
    assert world.to_json() == {
        "world_size": 1,
        "ranks": [
            {
                "rank": 0,
                "roles": ["harness", "leader", "executor"],
                "instance": 0,
                "instance_rank": 0,
                "tp_rank": 0,
                "pp_rank": 0,
                "ep_rank": 0,
                "node": "localhost",
                "device": 0,
                "server": None,
                "server_devices": (),
            }
        ],
    }


def test_json_of_a_control_rank_has_nulls() -> None:
    data = json.loads(json.dumps(plan(generate("aggregated", 2), 2, ["a", "b"]).to_json()))
    assert data["ranks"][0] == {
        "rank": 0,
        "roles": ["harness", "leader"],
        "instance": None,
        "instance_rank": None,
        "tp_rank": None,
        "pp_rank": None,
        "ep_rank": None,
        "node": "a",
        "device": None,
        "server": None,
        "server_devices": [],
    }
    assert (data["ranks"][1]["node"], data["ranks"][1]["device"], data["ranks"][1]["roles"]) == (
        "b",
        0,
        ["executor"],
    )


@pytest.mark.parametrize(
    ("workers", "world_size", "fits"),
    [
        (3, 3, "4 .* or 5 "),
        (3, 6, "4 .* or 5 "),
        (1, 4, "1 .*, 2 .* or 3 "),
        (2, 1, "3 .* or 4 "),
        (3, 0, "4 .* or 5 "),
    ],
)
def test_a_world_size_that_does_not_fit_is_named_with_those_that_do(
    workers: int, world_size: int, fits: str
) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"world size: {world_size}; the configuration has {workers} worker ranks .*must be {fits}",
    ):
        plan(config(executors=section(workers)), world_size)


def test_one_rank_cannot_be_disaggregated() -> None:
    with pytest.raises(ConfigError, match=r"must be 3 .* or 4 "):
        plan(config(context_servers={}, generation_servers={}), 1)


def test_nodes_must_name_every_rank() -> None:
    with pytest.raises(ConfigError, match="2 given; must be 3"):
        plan(generate("disaggregated", 3), 3, ["a", "b"])


class Mapping:
    """Restates the rank arithmetic of tensorrt_llm/mapping.py."""

    def __init__(self, rank: int, tp: int, cp: int, ep: int) -> None:
        self.tp_rank = rank % tp
        self.pp_rank = rank // (tp * cp)
        self.ep_rank = self.tp_rank % ep


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(1, 3))
def test_coordinates_are_those_of_trtllm(
    instances: int, half_tp: int, pp: int, cp: int, control_and_ep: int
) -> None:
    n_control, ep = (1, 1) if control_and_ep == 1 else (2, control_and_ep)
    tp = half_tp * ep
    shape = section(instances, tp, pp, context_parallel_size=cp, moe_expert_parallel_size=ep)
    world = plan(
        config(context_servers=shape, generation_servers=section(1)), instances * tp * pp * cp + 1 + n_control
    )
    size = tp * pp * cp
    for rank in world.ranks[n_control:-1]:
        worker = rank.rank - n_control
        mapping = Mapping(worker % size, tp, cp, ep)
        assert (rank.instance, rank.instance_rank) == (worker // size, worker % size)
        assert (rank.tp_rank, rank.pp_rank, rank.ep_rank) == (
            mapping.tp_rank,
            mapping.pp_rank,
            mapping.ep_rank,
        )
    assert world.instances[0].root_rank == n_control


def test_devices_count_the_workers_of_each_node_under_any_placement() -> None:
    world = plan(generate("aggregated", 8), 8, ["a", "b", "c", "a", "b", "c", "a", "b"])
    assert [rank.device for rank in world.ranks] == [None, 0, 0, 0, 1, 1, 1, 2]


def test_contiguous_if_no_group_is_split_needlessly() -> None:
    world = plan(
        config(context_servers=section(1, 2), generation_servers=section(2, 2, 2)), 12, parse_nodes("a:4,b:8")
    )
    assert [i.ranks for i in world.instances] == [(2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]
    # One split cannot be avoided here, whichever group has it: then it is the contiguous one.
    world = plan(config(executors=section(2, 2)), 6, parse_nodes("a:3,b:3"))
    assert [i.ranks for i in world.instances] == [(2, 3), (4, 5)]
    assert world.tp_splits == 1


def test_the_control_rank_does_not_shift_every_group_over_a_border() -> None:
    """With 7 workers on the first node and 1 on the last, only one group of 8 is split; contiguous groups
    would all be."""
    world = plan(config(executors=section(4, 8)), 33, parse_nodes("a:8,b:8,c:8,d:8,e:1"))
    assert world.tp_splits == 1
    assert [i.ranks for i in world.instances] == [
        (*range(1, 8), 32),
        tuple(range(8, 16)),
        tuple(range(16, 24)),
        tuple(range(24, 32)),
    ]


def test_cyclic_placement() -> None:
    nodes = ["a", "b"] * 5
    world = plan(config(context_servers=section(2, 2), generation_servers=section(1, 2, 2)), 10, nodes)
    assert world.tp_splits == 0
    for instance in world.instances:
        assert len({nodes[rank] for rank in instance.ranks}) == 1
    assert sorted(rank for i in world.instances for rank in i.ranks) == list(range(2, 10))


def test_pipeline_stages_stay_on_one_node_where_ranks_are_chosen() -> None:
    """Slots 3, 5, 4 hold four groups of 2 in two instances and four of 1: the stages of an instance fit on
    one node."""
    nodes = parse_nodes("a:5,b:5,c:4")
    world = plan(config(context_servers=section(2, 2, 2), generation_servers=section(4)), 14, nodes)
    assert world.tp_splits == 0
    assert [{nodes[rank] for rank in i.ranks} for i in world.instances[:2]] == [{"b"}, {"c"}]


def test_an_instance_prefers_one_node_to_neighbouring_ranks() -> None:
    nodes = ["a", *"babbbacc"]  # TP groups in rank order: b, a, b, c
    world = plan(config(executors=section(2, 2, 2)), 9, nodes)
    assert [{nodes[rank] for rank in i.ranks} for i in world.instances] == [{"b"}, {"a", "c"}]
    assert world.tp_splits == 0


def test_context_leaves_room_for_whole_generation_instances() -> None:
    nodes = ["a"] + ["a", "b"] * 6
    world = plan(config(context_servers=section(2, 2), generation_servers=section(2, 2, 2)), 13, nodes)
    assert [{nodes[rank] for rank in i.ranks} for i in world.instances] == [{"a"}, {"b"}, {"a"}, {"b"}]


def fewest_splits(slots: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    """Try every way to take each group's ranks from the nodes, and return the fewest splits."""

    @cache
    def best(left: tuple[int, ...], groups: tuple[int, ...]) -> int:
        if not groups:
            return 0
        ways = (way for way in product(*(range(n + 1) for n in left)) if sum(way) == groups[0])
        # Which node is which does not matter for the rest, so equal questions are asked once.
        return min(
            sum(n > 0 for n in way)
            - 1
            + best(tuple(sorted(n - w for n, w in zip(left, way, strict=True))), groups[1:])
            for way in ways
        )

    return best(tuple(sorted(slots)), sizes)


@st.composite
def small_worlds(draw: st.DrawFn) -> tuple[DisaggConfig, list[str]]:
    def small(most: int) -> dict[str, int]:
        tp, pp = draw(st.integers(1, 5)), draw(st.integers(1, 2))
        return section(draw(st.integers(1, max(1, most // (tp * pp)))), tp, pp)

    made = (
        config(executors=small(12))
        if draw(st.booleans())
        else config(context_servers=small(7), generation_servers=small(7))
    )
    n_control = draw(st.integers(1, 2))
    n_nodes = draw(st.integers(1, 5))
    return made, [f"n{draw(st.integers(0, n_nodes - 1))}" for _ in range(made.n_workers + n_control)]


@settings(max_examples=200, deadline=None)
@given(small_worlds())
# the first division that works has one split too many
@example((config(executors=section(3, 5)), ["h", *"aaabbbcccddeefg"]))
@example(
    (config(context_servers=section(1, 4), generation_servers=section(2, 3)), ["c", *"aaaa", *"bbbbb", "d"])
)
@example((config(context_servers=section(1), generation_servers=section(1, 8)), ["c", *"aaaa", *"bbbb", "d"]))
def test_no_plan_splits_fewer_tp_groups(world_and_nodes: tuple[DisaggConfig, list[str]]) -> None:
    made, nodes = world_and_nodes
    n_control = len(nodes) - made.n_workers
    world = plan(made, len(nodes), nodes)
    check_consistent(world, made, nodes, n_control)
    slots = tuple(Counter(nodes[n_control:]).values())
    sizes = [
        s.tensor_parallel_size
        for _, s in made.sections
        for _ in range(s.num_instances * s.pipeline_parallel_size)
    ]
    assert world.tp_splits == fewest_splits(slots, tuple(sorted(sizes, reverse=True)))


def check_consistent(world: WorldPlan, made: DisaggConfig, nodes: list[str], n_control: int) -> None:
    assert sorted(rank for i in world.instances for rank in i.ranks) == list(range(n_control, len(nodes)))
    expected = [(name, server) for name, server in made.sections for _ in range(server.num_instances)]
    roles = {"context_servers": "ctx", "generation_servers": "gen", "executors": "executor"}
    assert [(i.role, i.server) for i in world.instances] == [
        (roles[name], server) for name, server in expected
    ]
    devices: Counter[str] = Counter()
    for rank, node in enumerate(nodes):
        planned = world.ranks[rank]
        assert (planned.rank, planned.node) == (rank, node)
        if rank >= n_control:
            assert planned.instance is not None and planned.instance_rank is not None
            assert world.instances[planned.instance].ranks[planned.instance_rank] == rank
            assert planned.device == devices[node]
            devices[node] += 1


# of CPU time: 0.1 to 0.6 measured; what grows with the square of the ranks takes longer anywhere
AT_ONCE_S = 3.0


@pytest.mark.parametrize(
    ("made", "nodes", "splits"),
    [
        (config(executors=section(8190)), "block", 0),
        (config(executors=section(1023, 8, 1)), "cyclic", 7),  # eight nodes with 7 workers, in one set of 8
        (config(context_servers=section(1023, 2), generation_servers=section(384, 8, 2)), "block", 0),
        (config(executors=section(1023, 8)), "alone", 1023 * 7),
    ],
)
def test_8192_ranks_are_planned_at_once(made: DisaggConfig, nodes: str, splits: int) -> None:
    world_size = made.n_workers + 2
    per_node: dict[str, Callable[[int], int]] = {
        "block": lambda rank: rank // 8,
        "cyclic": lambda rank: rank % 1024,
        "alone": lambda rank: rank,
    }
    hosts = [f"n{per_node[nodes](rank)}" for rank in range(world_size)]
    start = time.process_time()
    world = plan(made, world_size, hosts)
    assert time.process_time() - start < AT_ONCE_S
    assert world.tp_splits == splits


def test_many_kinds_of_nodes_are_still_planned_at_once() -> None:
    hosts = [f"n{rank * rank % 1201}" for rank in range(8186)]  # 601 nodes with 6 to 14 ranks
    made = config(context_servers=section(1023, 4), generation_servers=section(1364, 3))
    start = time.process_time()
    world = plan(made, 8186, hosts)
    assert time.process_time() - start < AT_ONCE_S
    check_consistent(world, made, hosts, 2)


def test_parse_nodes() -> None:
    assert parse_nodes("a:2,b:1") == ["a", "a", "b"]
    assert parse_nodes(" a , b:2 ,a") == ["a", "b", "b", "a"]


@pytest.mark.parametrize("text", ["", "a:0", "a:", "a:x", ":4", "a:1,,b:1", "a:-1", "a:99999999", "a:²"])
def test_parse_nodes_names_what_is_wrong(text: str) -> None:
    with pytest.raises(ConfigError, match=r"nodes: .* must be host:slots"):
        parse_nodes(text)


@pytest.mark.parametrize("nodes", [["a", "b", "a", "b", "a", "b", "b", "a"], ["a"] * 8])
def test_a_plan_is_sent_as_what_it_is_made_from(nodes: list[str]) -> None:
    """It arrives as it was, and is small for any number of ranks."""
    made = plan(generate("disaggregated", 8, ctx_tp_size=2), 8, nodes)
    assert pickle.loads(pickle.dumps(made)) == made
    large = plan(
        generate("aggregated", 4098, tensor_parallelism=2), 4098, [f"n{i // 8}" for i in range(4098)]
    )
    assert len(pickle.dumps(large)) < 16_000


def test_servers_are_owned_by_the_first_of_their_clients() -> None:
    world = plan(generate("aggregated", 7), 7, ["a", "a", "a", "b", "b", "b", "b"], clients_per_server=3)
    assert [rank.server for rank in world.ranks] == [None, 0, 0, 0, 1, 1, 1]
    assert [rank.rank for rank in world.ranks if "server" in rank.roles] == [1, 4]
    first, second = world.servers
    assert (first.clients, first.place, second.clients, second.place) == ((1, 2, 3), 0, (4, 5, 6), 0)
    assert pickle.loads(pickle.dumps(world)) == world
    with pytest.raises(ConfigError, match="with 4 clients of each server it must be 5, 9, 13"):
        plan(generate("aggregated", 7), 7, clients_per_server=4)


def test_a_server_over_several_nodes_has_an_owner_on_each() -> None:
    def made(nodes: list[str], clients: int, n: int) -> WorldPlan:
        size = len(nodes)
        return plan(generate("aggregated", size), size, nodes, clients, nodes_per_server=n)

    world = made(["a", "a", "b", "c", "d"], 2, 2)
    assert [rank.rank for rank in world.ranks if "server" in rank.roles] == [1, 2, 3, 4]
    assert [(one.owner, one.parts, one.clients) for one in world.servers] == [
        (1, (1, 2), (1, 2)),
        (3, (3, 4), (3, 4)),
    ]
    assert pickle.loads(pickle.dumps(world)) == world
    world = made(["a", "a", "a", "b", "b"], 4, 2)
    assert [(one.parts, one.clients) for one in world.servers] == [((1, 3), (1, 2, 3, 4))]
    with pytest.raises(
        ConfigError, match=r"server 1 goes over 2 nodes, so these ranks must be on so many: 3, 4, on b$"
    ):
        made(["a", "a", "b", "b", "b"], 2, 2)


def test_two_servers_of_a_node_have_places() -> None:
    world = plan(generate("aggregated", 3), 3, clients_per_server=1)
    assert [server.place for server in world.servers] == [0, 1]
    assert all(rank.device is None for rank in world.ranks)
    assert not plan(generate("aggregated", 3), 3).servers
