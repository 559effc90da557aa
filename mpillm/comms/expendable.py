"""Which instances a run can go on without: --on_instance_loss continue."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from disagg import InstancePlan, WorldPlan
from mpillm.comms.messages import Lost
from mpillm.errors import ExitCode, Failure, RunError


class Expendable:
    """Rank 0's account of the instances that are left. The last one of a kind can't be given up."""

    def __init__(self, plan: WorldPlan, on_loss: Callable[[InstancePlan, Failure], None]) -> None:
        """`on_loss`: called for each instance that is given up, with the reason."""
        self._plan = plan
        self._on_loss = on_loss
        self._left = {instance.index: instance for instance in plan.instances}

    def give_up(self, failures: tuple[Failure, ...]) -> list[Lost]:
        """Give up the instances whose ranks have failed.

        Raises RunError if that leaves none of a kind, or if another failure is among them.
        """
        lost: dict[int, Failure] = {}
        for failure in failures:
            instance = None if failure.rank is None else self._plan.ranks[failure.rank].instance
            if instance is None or failure.interrupted or failure.code == ExitCode.USAGE:
                raise RunError(*failures)
            if not {self._plan.harness_rank, self._plan.leader_rank}.isdisjoint(
                self._plan.instances[instance].ranks
            ):
                raise RunError(*failures)
            if instance in self._left:
                lost.setdefault(instance, failure)
        left = [instance for instance in self._left.values() if instance.index not in lost]
        for role in {instance.role for instance in self._left.values()}:
            if not any(instance.role == role for instance in left):
                raise RunError(*(self._last(failure) for failure in failures))
        for index, failure in lost.items():
            self._on_loss(self._left.pop(index), failure)
        return [Lost(index, tuple(self._plan.instances[index].ranks)) for index in lost]

    def _last(self, failure: Failure) -> Failure:
        """Return the failure, with why the run does not go on."""
        role = self._plan.instances[self._plan.ranks[failure.rank or 0].instance or 0].role
        kind = {"ctx": "context instance", "gen": "generation instance"}.get(role, role)
        return dataclasses.replace(failure, cause=f"{failure.cause}\nno other {kind} is left")
