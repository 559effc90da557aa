"""Deadlines: every wait of a run has one."""

from __future__ import annotations

from mpillm.options.field import EVERYWHERE, Field, Options, option
from mpillm.options.fields.effects import MODELS, STAGES, TIME, used_by
from mpillm.options.parsers import seconds
from mpillm.phases import PHASES, Phase


def _of_phase(phase: Phase, default: float, more: str = "") -> Field[float]:
    return option(
        f"longest time for phase {phase}, seconds{more}", seconds, default=default, effect=EVERYWHERE
    )


class DeadlineFields(Options, group="deadlines", effect=TIME):
    """Deadlines: every wait of a run has one."""

    join_deadline = _of_phase("join", 60.0)
    load_deadline = _of_phase("load", 1800.0)
    health_deadline = _of_phase("health", 120.0)
    warmup_deadline = _of_phase("warmup", 300.0)
    ready_deadline = _of_phase("ready", 60.0)
    test_deadline = _of_phase("test", 21600.0, "; unless set, at least twice --min_duration")
    drain_deadline = _of_phase("drain", 300.0)
    stop_deadline = _of_phase("stop", 60.0)
    stall_timeout = option(
        "longest silence of an instance with open requests, of a started server, or of a client"
        " (--harness), seconds",
        seconds,
        default=300.0,
    )
    heartbeat_timeout = option(
        "seconds without a heartbeat after which a rank is lost", seconds, default=30.0
    )
    grace = option("longest time for ranks to end after a failure, seconds", seconds, default=5.0)
    on_instance_loss = option(
        "what happens when an instance is lost during the test. fail: the run ends. continue: it goes on"
        " without the instance, and others compute its open requests again (the default of serve, where"
        " that is possible). restart: a server of --server is started again and answers its open requests",
        default="fail",
        choices=("fail", "continue", "restart"),
    )
    build_deadline = option(
        "longest time for one stage of generate-engines (a quantization or a build), seconds",
        seconds,
        default=43200.0,
        effect=used_by(*MODELS, commands=STAGES, measured=False),
    )


FIELD_OF: dict[Phase, Field[float]] = {
    phase: getattr(DeadlineFields, f"{phase}_deadline") for phase in PHASES
}
"""The deadline of each phase, in the order of the phases."""

DEADLINES: dict[Phase, float] = {phase: field.default for phase, field in FIELD_OF.items()}
