"""How long a run waits: no wait is without a limit."""

from __future__ import annotations

from mpillm.configurator import Field
from mpillm.fields.parsers import seconds

DEADLINES = {"join": 60, "load": 1800, "health": 120, "warmup": 300, "ready": 60, "test": 21600, "drain": 300, "stop": 60}

vars().update(
    {
        f"{phase}_deadline": Field(f"{phase}_deadline", f"phase {phase}, seconds", seconds, default=float(value), group="deadlines")
        for phase, value in DEADLINES.items()
    }
)
stall_timeout = Field(
    "stall_timeout",
    "an instance that owes answers, or a server that was started, may be silent for this many seconds",
    seconds,
    default=300.0,
    group="deadlines",
)
heartbeat_timeout = Field(
    "heartbeat_timeout", "a rank whose heartbeat is missing for this many seconds is lost", seconds, default=30.0, group="deadlines"
)
grace = Field("grace", "seconds that ranks have to end after a failure", seconds, default=5.0, group="deadlines")
build_deadline = Field(
    "build_deadline", "a stage of generate-engines, a quantisation or a build, seconds", seconds, default=43200.0, group="deadlines"
)
