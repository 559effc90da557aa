"""A core of which some instances are slow: run as ``--core_type tests.helpers.unequal_cores:Unequal``."""

from __future__ import annotations

import dataclasses

from mpillm.comms.communicators import InstanceComms
from mpillm.cores.base import CoreConfig
from mpillm.cores.dummy import DummyCore

UNEQUAL = "tests.helpers.unequal_cores:Unequal"
SLOWER = 3


class Unequal(DummyCore):
    """Is a dummy; instance 0 takes `SLOWER` times as long."""

    def __init__(self, config: CoreConfig, comms: InstanceComms | None = None) -> None:
        super().__init__(config, comms)
        if config.instance == 0:
            ttft, tpot = self.options.ttft_ms * SLOWER, self.options.tpot_ms * SLOWER
            self.options = dataclasses.replace(self.options, ttft_ms=ttft, tpot_ms=tpot)
