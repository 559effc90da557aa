"""Deadlines: every wait of a run has one."""

from __future__ import annotations

from mpillm.configurator import Field, Options
from mpillm.configurator.parsers import seconds
from mpillm.fields.effects import TIME
from mpillm.phases import Phase

FIELD_OF: dict[Phase, Field[float]] = {}
"""The deadline of each phase, in their order."""


def _deadline(phase: Phase, default: float) -> Field[float]:
    FIELD_OF[phase] = Field(
        f"{phase}_deadline",
        f"longest time for phase {phase}, seconds",
        seconds,
        default=default,
        group="deadlines",
    )
    return FIELD_OF[phase]


class DeadlineFields(Options):
    """Deadlines: every wait of a run has one."""

    join_deadline = _deadline("join", 60.0)
    load_deadline = _deadline("load", 1800.0)
    health_deadline = _deadline("health", 120.0)
    warmup_deadline = _deadline("warmup", 300.0)
    ready_deadline = _deadline("ready", 60.0)
    test_deadline = _deadline("test", 21600.0)
    drain_deadline = _deadline("drain", 300.0)
    stop_deadline = _deadline("stop", 60.0)
    stall_timeout = Field(
        "stall_timeout",
        "longest silence of an instance with open requests, of a started server, or of a client"
        " (--harness), seconds",
        seconds,
        default=300.0,
        effect=TIME,
        group="deadlines",
    )
    heartbeat_timeout = Field(
        "heartbeat_timeout",
        "seconds without a heartbeat after which a rank is lost",
        seconds,
        default=30.0,
        effect=TIME,
        group="deadlines",
    )
    grace = Field(
        "grace",
        "longest time for ranks to end after a failure, seconds",
        seconds,
        default=5.0,
        effect=TIME,
        group="deadlines",
    )
    on_instance_loss = Field(
        "on_instance_loss",
        "what a lost instance means in the test: the end of the run, or less of it: what the instance owed is"
        " computed again elsewhere [default of serve: continue, where that is possible]; restart: a server of"
        " --server is started again, and then answers what it owed",
        default="fail",
        choices=("fail", "continue", "restart"),
        effect=TIME,
        group="deadlines",
    )
    build_deadline = Field(
        "build_deadline",
        "longest time for one stage of generate-engines (a quantisation or a build), seconds",
        seconds,
        default=43200.0,
        effect=TIME,
        group="deadlines",
    )


DEADLINES: dict[Phase, float] = {phase: field.default for phase, field in FIELD_OF.items()}
