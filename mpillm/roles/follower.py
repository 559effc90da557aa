"""Base role of every rank of an instance: start and poll the rank's core."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from mpillm.cores.base import LLMCore
from mpillm.cores.capabilities import FindsServers, RecordsSteps, ReportsCompilations, TransfersKv
from mpillm.roles.role import Role
from mpillm.telemetry.recorder import Recorder

_log = logging.getLogger(__name__)


class FollowerRole(Role):
    """Role of a rank that is not its instance's root rank. The rank's core follows the root rank's core."""

    def __init__(self, core: LLMCore) -> None:
        self._core = core
        self._has_stopped = False
        self._handoff_core = core if isinstance(core, TransfersKv) else None

    def load(self) -> None:
        self._core.load()

    def health(self) -> None:
        self._core.run_health_check()

    def ready(self) -> None:
        self._core.start_test()

    def drain(self) -> None:
        self._core.flush()

    def stop(self) -> None:
        if not self._has_stopped:  # the rank calls `stop` twice if STOP arrives in phase stop
            self._has_stopped = True
            self._core.notify_stop()

    def find_servers(self, urls: Mapping[int, str]) -> None:
        if isinstance(self._core, FindsServers):
            self._core.find_servers(urls)

    def lost(self, instance: int) -> None:
        if self._handoff_core is not None:
            self._handoff_core.lose_peer(instance)

    def poll(self) -> bool:
        if self._handoff_core is not None:
            self._handoff_core.poll_kv()
        if not self._core.has_work():
            return False
        self._core.poll_responses()
        return True

    def doing(self) -> str:
        return self._core.doing()

    def quiet_s(self) -> float:
        return self._core.quiet_s()

    def record(self, recorder: Recorder) -> None:
        if isinstance(self._core, RecordsSteps):
            self._core.record_steps(recorder)

    def report(self) -> dict[str, Any]:
        compiled = self._core.compiled_in_test() if isinstance(self._core, ReportsCompilations) else []
        for name in compiled:
            _log.warning("compiled in the test: %s", name)
        return {"compiled": compiled}
