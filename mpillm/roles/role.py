"""A role: what a rank does in each phase. Roles that share a rank share its event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpillm.cores.base import Metrics
    from mpillm.phases import Phase


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

    def done(self, phase: Phase) -> bool:
        """Whether this role's part of `phase` is done."""
        return True

    def measured(self) -> tuple[float, Metrics] | None:
        """Seconds of the test, and what the instance that this role leads has computed by then. Called in the heartbeat's thread."""
        return None

    def report(self) -> dict[str, Any]:
        """What rank 0 is told of the test when this rank has drained."""
        return {}
