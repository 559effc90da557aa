"""The world plan: role, instance, TP/PP/EP coordinates, node and device of each rank.

Rank 0 is always a control rank. With workers + 1 ranks, rank 0 is the harness and the leader. With
workers + 2 ranks, rank 0 is the harness and rank 1 the leader. In two cases, one rank has every role: in a
world of one rank (one executor, for debugging), and on the root rank of an instance that is a separate run
(`DisaggConfig.is_single_phase`).

Instances are numbered in the order context, generation, executors. They use the worker ranks in this order,
contiguously, as in TensorRT-LLM. If this would split TP groups over more nodes than necessary,
`placement` chooses the ranks. Inside an instance, the order follows TensorRT-LLM's Mapping: tp_rank varies
fastest, then the context-parallel rank, then pp_rank. The first rank is the root rank.
ep_rank = tp_rank % ep_size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

from .config import DisaggConfig, ServerConfig
from .errors import ConfigError
from .placement import place
from .schema import SECTIONS, section_kind

CONTROL = frozenset(("harness", "leader"))
"""The roles of control ranks."""
ROLES = {"context_servers": "ctx", "generation_servers": "gen", "executors": "executor"}
_MAX_RANKS = 1 << 20  # a larger slot count is a typing error
_CONTEXT_OWNER = ("server", "ctx")  # the roles of a rank that owns a context server


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank.

    The fields for instance and device are None for a control rank, and for a rank that only owns a server.
    """

    rank: int
    roles: tuple[str, ...]  # of harness, leader, server, ctx, gen, executor
    instance: int | None
    instance_rank: int | None  # the rank's index in the instance
    tp_rank: int | None
    pp_rank: int | None
    ep_rank: int | None
    node: str
    device: int | None  # index among the workers of its node; in a run, index of its GPU
    # Index of the server that this rank owns or uses. A server's first client owns the server, but the owner
    # of a context server is not a client.
    server: int | None = None
    server_devices: tuple[int, ...] = ()  # in a run, the GPUs of the server that this rank owns


@dataclass(frozen=True, slots=True)
class InstancePlan:
    """One copy of the model."""

    index: int  # among all instances of the world
    role: str  # ctx, gen or executor
    ranks: tuple[int, ...]  # in instance order
    server: ServerConfig
    section: str = ""  # section of `server` in the file

    @property
    def root_rank(self) -> int:
        return self.ranks[0]

    @property
    def tp_size(self) -> int:
        return self.server.tensor_parallel_size

    @property
    def pp_size(self) -> int:
        return self.server.pipeline_parallel_size

    @property
    def ep_size(self) -> int:
        return self.server.moe_expert_parallel_size

    @property
    def tp_groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each TP group, in instance order."""
        return tuple(self.ranks[i : i + self.tp_size] for i in range(0, len(self.ranks), self.tp_size))


@dataclass(frozen=True, slots=True)
class OwnServer:
    """A server that a rank starts and owns. Executors are its clients."""

    index: int
    owner: int  # a rank
    clients: tuple[int, ...]  # ranks; the owner is the first one, but not a context server's
    parts: tuple[int, ...]  # ranks, one per node, that own the server's part on a node; the owner is first
    place: int  # number among the servers of the owner's node
    role: str = ""  # context or generation; "": both


@dataclass(frozen=True, slots=True)
class WorldPlan:
    """The ranks and instances of a run."""

    ranks: tuple[RankPlan, ...]
    instances: tuple[InstancePlan, ...]
    config: DisaggConfig
    clients_per_server: int = 0  # for servers that ranks own; 0: no rank owns a server
    n_context_servers: int = 0  # servers that compute contexts for the generation servers
    nodes_per_server: int = 1

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments of `plan`. For thousands of ranks, these take a thirtieth of the space."""
        nodes = [(node, sum(1 for _ in ranks)) for node, ranks in groupby(rank.node for rank in self.ranks)]
        servers = (self.clients_per_server, self.n_context_servers, self.nodes_per_server)
        return _restore_plan, (self.config, nodes, *servers)

    def on_devices(self, own: Mapping[int, int], of_servers: Mapping[int, tuple[int, ...]]) -> WorldPlan:
        """Return a copy with the actual GPUs: `own` by rank, `of_servers` by owner. Other ranks have none."""
        ranks = (
            replace(one, device=own.get(one.rank), server_devices=of_servers.get(one.rank, ()))
            for one in self.ranks
        )
        return replace(self, ranks=tuple(ranks))

    @property
    def mode(self) -> str:
        """ "disaggregated" or "aggregated". If ranks own servers, the servers determine the mode."""
        return "disaggregated" if self.n_context_servers else self.config.mode

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def harness_rank(self) -> int:
        return 0

    @property
    def leader_rank(self) -> int:
        return next(rank.rank for rank in self.ranks if "leader" in rank.roles)

    @property
    def servers(self) -> tuple[OwnServer, ...]:
        """The servers that ranks own."""
        leaders = [instance.root_rank for instance in self.instances]
        n, n_contexts = self.clients_per_server, self.n_context_servers
        owned = [(rank.rank, *leaders) for rank in self.ranks if n_contexts and rank.roles == _CONTEXT_OWNER]
        owned += [tuple(leaders[first : first + n]) for first in range(0, len(leaders) if n else 0, n or 1)]
        servers: list[OwnServer] = []
        on_node: Counter[str] = Counter()
        for index, (owner, *others) in enumerate(owned):
            is_context = index < n_contexts
            clients = tuple(others) if is_context else (owner, *others)
            role = "" if not n_contexts else "context" if is_context else "generation"
            node = self.ranks[owner].node
            parts = (owner, *(other for other in others if "server" in self.ranks[other].roles))
            parts = parts if not is_context else (owner,)
            servers.append(OwnServer(index, owner, clients, parts, on_node[node], role))
            on_node[node] += 1
        return tuple(servers)

    @property
    def tp_splits(self) -> int:
        """Number of TP groups' nodes beyond each group's first; the fewest possible (see `placement`)."""
        return _splits(self.instances, [rank.node for rank in self.ranks])

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON data: `{"world_size", "ranks": [{"rank", "roles", "instance", ...}]}`.

        Fields that do not apply are None.
        """
        ranks = [{**asdict(rank), "roles": list(rank.roles)} for rank in self.ranks]
        return {"world_size": self.world_size, "ranks": ranks}


def plan(
    config: DisaggConfig,
    world_size: int,
    nodes: Sequence[str] | None = None,
    clients_per_server: int = 0,
    n_context_servers: int = 0,
    nodes_per_server: int = 1,
) -> WorldPlan:
    """Plan `world_size` ranks, with rank i on host ``nodes[i]`` (None: all on "localhost").

    `clients_per_server`: number of consecutive executors that are clients of one server. The first executor
    owns the server. `n_context_servers`: number of ranks, before the executors, that own a context server.
    `nodes_per_server`: nodes of one server. The first client on each node owns the server's part there.
    Raises ConfigError if the configuration's workers do not fit `world_size`. The error names fitting sizes.
    """
    check_pairs(config)
    n_workers = config.n_workers
    n_control = world_size - n_workers - n_context_servers
    alone = world_size == 1 and n_workers == 1 and config.mode == "aggregated"
    fits = n_control == 0 if config.is_single_phase else n_control in (1, 2) or alone
    if not fits:
        raise ConfigError(_wrong_size(config, world_size))
    if nodes is None:
        nodes = ["localhost"] * world_size
    if len(nodes) != world_size:
        raise ConfigError(f"nodes: {len(nodes)} given; must be {world_size}, one for each rank")

    if clients_per_server and config.n_workers % clients_per_server:
        some = [n_control + clients_per_server * n for n in (1, 2, 3)]
        raise ConfigError(
            f"world size: {world_size}; with {clients_per_server} clients of each server it must be"
            f" {some[0]}, {some[1]}, {some[2]}, …"
        )
    first = n_control + n_context_servers
    instances = _assign(config, range(first, world_size), nodes)
    control = {0: ("harness", "leader")} if n_control < 2 else {0: ("harness",), 1: ("leader",)}
    where = {rank: (instance, index) for instance in instances for index, rank in enumerate(instance.ranks)}
    devices: dict[str, int] = {}
    ranks = []
    for rank, node in enumerate(nodes):
        roles = control.get(rank, ())
        if rank not in where:
            owned = rank - n_control if rank >= n_control else None
            own_roles = roles if owned is None else _CONTEXT_OWNER
            ranks.append(RankPlan(rank, own_roles, None, None, None, None, None, node, None, owned))
            continue
        instance, index = where[rank]
        tp_rank = index % instance.tp_size
        pp_rank = index // (len(instance.ranks) // instance.pp_size)
        device = None if clients_per_server else devices.get(node, 0)
        devices[node] = devices.get(node, 0) + 1
        ep_rank = tp_rank % instance.ep_size
        server, owns = None, False
        if clients_per_server:
            server, client = divmod(instance.index, clients_per_server)
            server += n_context_servers
            owns = client == 0 or (nodes_per_server > 1 and node not in nodes[rank - client : rank])
        own_roles = (*roles, *(("server",) if owns else ()), instance.role)
        ranks.append(
            RankPlan(rank, own_roles, instance.index, index, tp_rank, pp_rank, ep_rank, node, device, server)
        )
    world = WorldPlan(
        tuple(ranks), instances, config, clients_per_server, n_context_servers, nodes_per_server
    )
    _check_parts(world)
    return world


def check_pairs(config: DisaggConfig) -> None:
    """Raise ConfigError if context or generation instances are missing, which only TensorRT-LLM supports."""
    if config.mode != "disaggregated" or config.is_single_phase:
        return
    present = {section_kind(name) for name, server in config.sections if server.num_instances}
    if lacking := [name for name in SECTIONS[:2] if name not in present]:
        raise ConfigError(
            f"{' and '.join(lacking)}: no instances; a request needs a context instance and a generation"
            " instance. For instances that do both, write only the section executors"
        )


def _check_parts(world: WorldPlan) -> None:
    """Raise ConfigError if the ranks of a server are not on `nodes_per_server` nodes."""
    n = world.nodes_per_server
    for server in world.servers if n > 1 else ():
        if len(server.parts) != n:
            on = ", ".join(dict.fromkeys(world.ranks[rank].node for rank in server.clients))
            raise ConfigError(
                f"server {server.index} goes over {n} nodes, so these ranks must be on so many:"
                f" {', '.join(map(str, server.clients))}, on {on}"
            )


def _restore_plan(config: DisaggConfig, nodes: Sequence[tuple[str, int]], *servers: int) -> WorldPlan:
    names = [name for name, count in nodes for _ in range(count)]
    return plan(config, len(names), names, *servers)


def parse_nodes(text: str) -> list[str]:
    """Return each rank's host. `a:4,b:8` means four ranks on a, then eight on b. `a` means one rank."""
    hosts: list[str] = []
    for item in text.split(","):
        host, colon, slots = item.strip().partition(":")
        count = int(slots) if slots.isascii() and slots.isdigit() and len(slots) < 8 else 0
        if not host or (colon and not 1 <= count <= _MAX_RANKS):
            raise ConfigError(f"nodes: {item!r} in {text!r}; must be host:slots, with at least 1 slot")
        hosts += [host] * (count if colon else 1)
    return hosts


def _wrong_size(config: DisaggConfig, world_size: int) -> str:
    terms = [f"{s.num_instances} x {s.ranks_per_instance} in {name}" for name, s in config.sections]
    n = config.n_workers
    fits = (
        str(n) if config.is_single_phase else f"{n + 1} (harness and leader on one rank) or {n + 2} (on two)"
    )
    if n == 1 and config.mode == "aggregated":
        fits = f"1 (all on one rank), {fits}"
    workers = f"the configuration has {n} worker ranks ({', '.join(terms)})"
    return f"world size: {world_size}; {workers}, so it must be {fits}"


def _assign(config: DisaggConfig, workers: range, nodes: Sequence[str]) -> tuple[InstancePlan, ...]:
    """Assign ranks to instances: contiguous, unless this splits TP groups unnecessarily."""
    servers = [(name, server) for name, server in config.sections for _ in range(server.num_instances)]

    def numbered(ranks: Sequence[Sequence[int]]) -> tuple[InstancePlan, ...]:
        return tuple(
            InstancePlan(i, ROLES[section_kind(name)], tuple(ranks[i]), server, name)
            for i, (name, server) in enumerate(servers)
        )

    contiguous, start = [], workers.start
    for _, server in servers:
        contiguous.append(range(start, start + server.ranks_per_instance))
        start += server.ranks_per_instance
    in_order = numbered(contiguous)
    n_splits = _splits(in_order, nodes)
    if n_splits == 0 or len(config.sections) > 2:  # `place` supports only two sizes
        return in_order

    on_node: dict[str, list[int]] = {}
    for rank in workers:
        on_node.setdefault(nodes[rank], []).append(rank)
    sections = [server for _, server in config.sections]
    # If there is only one section, it is first and last.
    first, last = sections[0], sections[-1]
    n_groups = [s.num_instances * s.ranks_per_instance // s.tensor_parallel_size for s in sections]
    chosen = place(
        list(on_node.values()),
        (first.tensor_parallel_size, last.tensor_parallel_size),
        (n_groups[0], n_groups[1] if len(sections) == 2 else 0),
        (
            first.ranks_per_instance // first.tensor_parallel_size,
            last.ranks_per_instance // last.tensor_parallel_size,
        ),
    )
    moved = numbered(chosen[0] + chosen[1])
    return moved if _splits(moved, nodes) < n_splits else in_order


def _splits(instances: Sequence[InstancePlan], nodes: Sequence[str]) -> int:
    return sum(
        len({nodes[rank] for rank in group}) - 1 for instance in instances for group in instance.tp_groups
    )
