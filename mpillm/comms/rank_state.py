"""State of a rank, as its messages to rank 0 report it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from mpillm.comms.messages import Beat


@dataclass
class RankState:
    """State of a rank, as rank 0 has received it."""

    label: str  # "rank 3"; once there is a plan, "rank 3 (gen, instance 1)"
    instance: int | None = None
    host: str = ""
    pid: int = 0
    pids: str = ""  # see `siblings.visible_pids`
    last_message_at: float = field(default_factory=time.monotonic)
    how_stopped: str = ""  # see `StoppedRank`; "" after a heartbeat
    seen: str = ""  # the phase in its last message
    beat: Beat | None = None
    measured: Any = None  # from its latest heartbeat (see `Role.measured`)
    doing: str = "not here yet"  # from its latest heartbeat (see `Role.doing`)

    def describe(self) -> str:
        """Return label, host and pid."""
        return f"{self.label}, {self.host}, pid {self.pid}" if self.pid else self.label

    def activity(self) -> str:
        """Return the rank's last reported activity, in one line; "" if none."""
        return self.doing.partition("\n")[0] if self.beat else ""

    def last_seen(self) -> str:
        """Return the phase in the rank's last message and, if its main thread was stuck there, the stack."""
        stack = (
            f", stuck for {self.beat.away_s:.1f} s in:\n{self.beat.stack.rstrip()}"
            if self.beat and self.beat.stack
            else ""
        )
        return f"last seen in phase '{self.seen}'{stack}" if self.seen else "it has not joined"
