"""Roles, with a transport that only notes what is sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from mpillm.comms.tags import Tag
from mpillm.cores.base import CoreConfig
from mpillm.cores.dummy import DummyCore
from mpillm.roles.instance import InstanceRole


def test_the_leader_is_not_told_of_requests_before_the_test() -> None:
    """Not even of those that are answered before this rank knows that the warm-up has begun: a context instance may know it earlier."""
    sent: list[Tag] = []
    route: Any = SimpleNamespace(handlers={}, send=lambda dest, tag, buffer: sent.append(tag))
    core = DummyCore(CoreConfig("dummy"))
    role = InstanceRole(core, route, leader=0, instance=0)
    role.load()
    core.enqueue(core.warm_up_requests())
    assert role.poll()
    role.warmup()
    assert role.poll()
    assert not sent
    role.ready()
    core.enqueue(core.warm_up_requests())
    assert role.poll()
    assert sent == [Tag.GRANT, Tag.DONE]
