"""A role: what a rank does in each phase. Roles that share a rank share its event loop."""

from __future__ import annotations

from typing import Any


class RouteMap:
    """World ranks and their ranks in the route communicator."""

    def __init__(self, ranks: list[int]) -> None:
        self._of_world = {world: route for route, world in enumerate(ranks)}

    def __getitem__(self, world_rank: int) -> int:
        return self._of_world[world_rank]


class Role:
    """Each phase has a method of its name, called once; the phase lasts until `done(phase)`, while `poll` is called."""

    def load(self) -> None: ...
    def health(self) -> None: ...
    def warmup(self) -> None: ...
    def ready(self) -> None: ...
    def test(self) -> None: ...
    def drain(self) -> None: ...
    def stop(self) -> None: ...

    def poll(self) -> bool:
        """Look for work, without waiting; whether there was any."""
        return False

    def done(self, phase: str) -> bool:
        """Whether this role's part of `phase` is done."""
        return True

    def report(self) -> dict[str, Any]:
        """What rank 0 is told of the test when this rank has drained."""
        return {}
