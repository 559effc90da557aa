"""Loss of instances with --on_instance_loss continue: decides whether the run can continue."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from disagg import InstancePlan, WorldPlan
from mpillm.comms.messages import InstanceLoss
from mpillm.errors import ExitCode, Failure, RunError


class InstanceLossPolicy:
    """Rank 0's record of the remaining instances. The run needs at least one instance of each role."""

    def __init__(self, plan: WorldPlan, on_loss: Callable[[InstancePlan, Failure], None]) -> None:
        """`on_loss`: called for each lost instance, with the reason."""
        self._plan = plan
        self._on_loss = on_loss
        self._remaining = {instance.index: instance for instance in plan.instances}

    def remove(self, failures: tuple[Failure, ...]) -> list[InstanceLoss]:
        """Remove the instances whose ranks have failed.

        Raises RunError if no instance of a role remains, or if a failure is not the loss of an instance.
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
            if instance in self._remaining:
                lost.setdefault(instance, failure)
        remaining = [instance for instance in self._remaining.values() if instance.index not in lost]
        for role in {instance.role for instance in self._remaining.values()}:
            if not any(instance.role == role for instance in remaining):
                raise RunError(*(self._last(failure) for failure in failures))
        for index, failure in lost.items():
            self._on_loss(self._remaining.pop(index), failure)
        return [InstanceLoss(index, tuple(self._plan.instances[index].ranks)) for index in lost]

    def _last(self, failure: Failure) -> Failure:
        """Return the failure, with the reason why the run cannot continue."""
        role = self._plan.instances[self._plan.ranks[failure.rank or 0].instance or 0].role
        kind = {"ctx": "context instance", "gen": "generation instance"}.get(role, role)
        return dataclasses.replace(failure, cause=f"{failure.cause}\nno other {kind} is left")
