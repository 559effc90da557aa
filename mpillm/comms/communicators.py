"""Communicators of a run, and their ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from disagg import WorldPlan
from mpillm.comms.wakeup_socket import WakeupSocket

if TYPE_CHECKING:
    from mpi4py import MPI


class RunComms(NamedTuple):
    """Communicators of all ranks of a run, in the same order. They exist before the first phase."""

    world: MPI.Intracomm  # only to create communicators
    control: MPI.Intracomm
    route: MPI.Intracomm


class InstanceComms(NamedTuple):
    """The communicators that a rank's core may use: its instance's, and those of its tp and pp groups."""

    instance: MPI.Intracomm
    tp: MPI.Intracomm
    pp: MPI.Intracomm
    wakeup: WakeupSocket | None = None


@dataclass(frozen=True)
class Communicators:
    """This rank's communicators; None: the rank is not a member. All ranks are in `control` and `route`."""

    control: MPI.Intracomm
    route: MPI.Intracomm
    handoff: MPI.Intracomm | None
    instance: InstanceComms | None

    def free(self) -> None:
        """Free all of them, the control communicator last."""
        if self.instance is not None:
            for member_of in (self.instance.pp, self.instance.tp, self.instance.instance):
                member_of.Free()
        if self.handoff is not None:
            self.handoff.Free()
        self.route.Free()
        self.control.Free()


def route_ranks(plan: WorldPlan) -> list[int]:
    """Return the ranks that send or receive requests and responses."""
    return sorted({plan.harness_rank, plan.leader_rank, *(instance.root_rank for instance in plan.instances)})


def handoff_ranks(plan: WorldPlan) -> list[int]:
    """Return the world ranks of the handoff communicator, in its order."""
    return [rank for instance in plan.instances if instance.role in ("ctx", "gen") for rank in instance.ranks]


def senders_to(rank: int, plan: WorldPlan) -> set[int]:
    """Return the world ranks, other than its own, from which messages for `rank` may come."""
    if rank == 0:  # reports of all ranks
        return set(range(1, len(plan.ranks)))
    groups = [route_ranks(plan), handoff_ranks(plan), *(instance.ranks for instance in plan.instances)]
    return {0, *(other for group in groups if rank in group for other in group)} - {rank}


def create_communicators(
    start: RunComms, plan: WorldPlan, wakeup: WakeupSocket | None = None
) -> Communicators:
    """Create every communicator of `plan` that this rank belongs to, in the same order on every rank.

    Each creation waits in MPI for the members only. A control rank is a member of none, so harness and leader
    can name a rank that is lost meanwhile: their route communicator exists before. MPI's messages during a
    creation use `start.world`, which no rank probes. In `control`, rank 0 would receive these messages.
    """
    world, control, route = start
    rank = control.rank
    own = plan.ranks[rank]
    handoff = _group(world, handoff_ranks(plan)) if rank in handoff_ranks(plan) else None
    if own.instance is None:
        return Communicators(control, route, handoff, None)
    members = [plan.ranks[r] for r in plan.instances[own.instance].ranks]
    instance = InstanceComms(
        _group(world, [m.rank for m in members]),
        _group(world, [m.rank for m in members if m.pp_rank == own.pp_rank]),
        _group(world, [m.rank for m in members if m.tp_rank == own.tp_rank]),
        wakeup,
    )
    return Communicators(control, route, handoff, instance)


def _group(world: MPI.Intracomm, ranks: Sequence[int]) -> MPI.Intracomm:
    """Create a communicator of `ranks`, which include this rank."""
    group = world.Get_group()
    members = group.Incl(list(ranks))
    comm = world.Create_group(members)
    members.Free()
    group.Free()
    return comm
