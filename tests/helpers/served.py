"""All roles of a run that serves, in one process and without their loops, with dummy cores."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from mpillm.comms.messages import NO_INSTANCE, RequestFlag
from mpillm.comms.mover import Peer
from mpillm.cores.base import CoreConfig
from mpillm.cores.dummy import VOCAB_SIZE, DummyCore
from mpillm.endpoint.frontend import Frontend, Mailbox
from mpillm.endpoint.open_requests import OpenRequests, PendingResponse
from mpillm.errors import Failure, RunError
from mpillm.roles.context import ContextRole
from mpillm.roles.generation import GenerationRole
from mpillm.roles.instance import InstanceRole
from mpillm.roles.leader import Leader
from mpillm.roles.role import Role
from tests.helpers.engine_configs import engine_config
from tests.helpers.loopback import Wire
from tests.helpers.route import Network

MAX_BATCH = 3


def _stalled(failure: Failure) -> None:
    raise RunError(failure)


class World:
    """Holds the ranks of a run that serves, without their loops: harness and leader, then an instance per
    rank."""

    def __init__(self, seed: int, disaggregated: bool, **options: Any) -> None:
        self.chance = random.Random(seed)
        roles = ["ctx", "ctx", "gen", "gen"] if disaggregated else ["executor", "executor"]
        n = len(roles)
        self.network = Network(2 + n, self.chance)
        routes = self.network.routes
        instances = [SimpleNamespace(index=i, role=role, root_rank=2 + i) for i, role in enumerate(roles)]
        plan: Any = SimpleNamespace(instances=instances, harness_rank=0, leader_rank=1)
        mailbox = Mailbox()
        self.open = OpenRequests(disaggregated, mailbox.out.append)
        mailbox.deliver = self.open.take
        endpoint: Any = SimpleNamespace(listen=lambda: None, listening=True, error="", drained=True)
        self.leader = Leader(routes[1], plan, "load_balancing", "round_robin", 300.0, _stalled)
        self.roles: list[Role] = [Frontend(routes[0], 1, mailbox, endpoint, 1.0), self.leader]
        wire = Wire()
        self.cores = []
        contexts = [i for i, role in enumerate(roles) if role == "ctx"]
        generations = [i for i, role in enumerate(roles) if role == "gen"]
        for i, role in enumerate(roles):
            name = {"ctx": "context", "gen": "generation", "executor": "executor"}[role]
            core = DummyCore(
                CoreConfig(
                    "dummy",
                    engine_config(role=name, instance=i, max_batch_size=MAX_BATCH, core_options=options),
                    rank=2 + i,
                )
            )
            core.connect(wire.mover(2 + i), {j: Peer(2 + j, 1, 1) for j in range(n)})
            core.load()
            self.cores.append(core)
            route = routes[2 + i]
            if role == "executor":
                made = InstanceRole(core, route, 1, i)
            elif role == "ctx":
                made = ContextRole(core, route, 1, i, {j: 2 + j for j in generations}, [])
            else:
                made = GenerationRole(core, route, 1, i, {2 + j: j for j in contexts}, 0)
            made.ready()
            self.roles.append(made)
        self.roles[0].test()
        self.settle()

    def turn(self) -> bool:
        """Let something happen somewhere; return whether anything did."""
        if self.chance.random() < 0.5:
            return self.network.deliver()
        return self.chance.choice(self.roles).poll()

    def settle(self) -> None:
        """Go on until nothing is left to happen."""
        quiet = 0
        while quiet < 200:
            quiet = 0 if self.turn() else quiet + 1

    def ask(self, prompt: list[int], n: int, stream: bool) -> PendingResponse:
        row = {"max_output": n, "top_p": 1, "generation": NO_INSTANCE, "flags": RequestFlag.STREAM * stream}
        return self.open.open(row, prompt)

    def check_unused(self) -> None:
        """Check that no rank holds anything of any request."""
        assert len(self.open) == 0
        assert set(self.leader.outstanding_by_instance().values()) == {0}
        assert not self.leader._waiting
        for pool in filter(None, (self.leader._entry, self.leader._generation)):
            assert pool.outstanding_tokens.tolist() == [0] * len(pool.instances)
        for core, role in zip(self.cores, self.roles[2:], strict=True):
            assert isinstance(role, InstanceRole)
            assert role._n_outstanding == 0 and role.done("drain")
            assert not core.has_work() and core._running == 0 and len(core._streams) == 0
            assert not (
                core._kv
                or core._transfers
                or core._waiting
                or core._instant
                or core._events
                or core._cancelled_before
            )
        for role in self.roles[2:]:
            if isinstance(role, ContextRole):
                assert not role._requests
            if isinstance(role, GenerationRole):
                assert len(role._receiver._slots) == 256


def whole(prompt: list[int], n: int) -> list[int]:
    """Return what the dummy core answers."""
    seed = sum(token * (2 * i + 1) for i, token in enumerate(prompt))
    return [(seed + j) % VOCAB_SIZE for j in range(n)]
