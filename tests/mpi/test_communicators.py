"""The communicators of a plan: who is in each, and in which order."""

from __future__ import annotations

import pytest
from mpi4py import MPI

import disagg
from disagg import WorldPlan
from launch.launcher import find_launcher
from mpillm.comms.communicators import RunComms, create_communicators, route_ranks

SECTION = (
    "num_instances: {}, tensor_parallel_size: {}, pipeline_parallel_size: {}, moe_expert_parallel_size: {}"
)


def members(comm: MPI.Intracomm | None) -> list[int] | None:
    """Return world ranks in the communicator's order."""
    if comm is None:
        return None
    group, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    ranks = MPI.Group.Translate_ranks(group, list(range(group.size)), world)
    group.Free()
    world.Free()
    return list(ranks)


def check(plan: WorldPlan, expected: dict[str, list[list[int]]]) -> None:
    """Check the groups of each communicator: a rank is in the group of `expected` that names it, or in
    none."""
    rank = MPI.COMM_WORLD.rank
    control = MPI.COMM_WORLD.Dup()
    comms = create_communicators(RunComms(MPI.COMM_WORLD, control, MPI.COMM_WORLD.Dup()), plan)
    assert [route_ranks(plan)] == expected.pop("route")
    every: dict[str, MPI.Intracomm | None] = {"handoff": comms.handoff}
    every |= comms.instance._asdict() if comms.instance else dict.fromkeys(("instance", "tp", "pp"))
    found = {name: members(every[name]) for name in expected}
    assert found == {
        name: next((group for group in groups if rank in group), None) for name, groups in expected.items()
    }
    for name, comm in every.items():
        if comm is not None:
            assert comm.allreduce(1) == comm.size  # it works
            assert comm.Get_errhandler() != MPI.ERRORS_ARE_FATAL, f"{name} aborts on an error"
    comms.free()


def yaml(**sections: tuple[int, int, int, int]) -> str:
    return "".join(f"{name}: {{{SECTION.format(*sizes)}}}\n" for name, sizes in sections.items())


@pytest.mark.mpi(min_size=2)
def test_one_executor_for_each_worker() -> None:
    size = MPI.COMM_WORLD.size
    workers = list(range(1, size))
    plan = disagg.plan(disagg.parse(yaml(executors=(size - 1, 1, 1, 1))), size)
    alone = [[rank] for rank in workers]
    check(plan, {"route": [list(range(size))], "handoff": [], "instance": alone, "tp": alone, "pp": alone})


@pytest.mark.mpi(min_size=5)
def test_tp_and_pp() -> None:
    """Ranks beyond the 5 that are tested form a world of their own."""
    if MPI.COMM_WORLD.size != 5:
        pytest.skip("for 5 ranks")
    plan = disagg.plan(disagg.parse(yaml(executors=(1, 2, 2, 1))), 5)
    groups = {
        "route": [[0, 1]],
        "handoff": [],
        "instance": [[1, 2, 3, 4]],
        "tp": [[1, 2], [3, 4]],
        "pp": [[1, 3], [2, 4]],
    }
    check(plan, groups)


@pytest.mark.mpi(min_size=5)
@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (
            {"context_servers": (1, 2, 1, 1), "generation_servers": (1, 1, 2, 1)},
            {
                "route": [[0, 1, 3]],
                "handoff": [[1, 2, 3, 4]],
                "instance": [[1, 2], [3, 4]],
                "tp": [[1, 2], [3], [4]],
                "pp": [[1], [2], [3, 4]],
            },
        ),
        (
            {"context_servers": (1, 1, 1, 1), "generation_servers": (1, 2, 1, 1)},
            {
                "route": [[0, 1, 2, 3]],
                "handoff": [[2, 3, 4]],
                "instance": [[2], [3, 4]],
                "tp": [[2], [3, 4]],
                "pp": [[2], [3], [4]],
            },
        ),
    ],
)
def test_disaggregated(
    sections: dict[str, tuple[int, int, int, int]], expected: dict[str, list[list[int]]]
) -> None:
    """Harness and leader are both in the route, on one rank or on two."""
    if MPI.COMM_WORLD.size != 5:
        pytest.skip("for 5 ranks")
    plan = disagg.plan(disagg.parse(yaml(**sections)), 5)
    check(plan, expected)


@pytest.mark.mpi(min_size=5)
def test_harness_and_leader_wait_for_nobody() -> None:
    """They name a rank that is lost in this moment: here the others come once they are through."""
    world, control = MPI.COMM_WORLD, MPI.COMM_WORLD.Dup()
    plan = disagg.plan(disagg.parse(yaml(context_servers=(1, 1, 1, 1), generation_servers=(1, 2, 1, 1))), 5)
    first = {plan.harness_rank, plan.leader_rank}
    start = RunComms(world, control, control.Dup())
    if world.rank not in first:
        for rank in first:
            control.recv(source=rank)
    comms = create_communicators(start, plan)
    if world.rank in first:
        for rank in set(range(5)) - first:
            control.send(None, rank)
    comms.free()


@pytest.mark.mpi(min_size=2)
def test_the_launcher_names_this_rank() -> None:
    launcher = find_launcher()
    assert launcher is not None and (launcher.size, launcher.rank) == (
        MPI.COMM_WORLD.size,
        MPI.COMM_WORLD.rank,
    )
