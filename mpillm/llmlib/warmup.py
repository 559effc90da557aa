"""Simultaneous health checks and warm-ups of many cores."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from mpillm.llmlib.cores.base import LLMCore, LLMRequest

_log = logging.getLogger(__name__)
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.1, 5.0


class WarmupManager:
    """Checks cores until all are healthy, then warms them up, in parallel."""

    def __init__(self, readiness_timeout: float = 300) -> None:
        """`readiness_timeout`: seconds until a core must be healthy."""
        self.readiness_timeout = readiness_timeout

    def run_health_checks(self, cores: Sequence[LLMCore]) -> None:
        """Wait until each core's `run_health_check` passes. Raises TimeoutError."""
        _each(cores, self._until_healthy)

    def warmup(self, cores: Sequence[LLMCore], warmup_queries: list[LLMRequest]) -> None:
        """Run health checks, then `warmup_queries` on each core, or its own `warm_up`."""
        self.run_health_checks(cores)
        _each(
            cores,
            lambda core: (
                core.warm_up_with(warmup_queries) if type(core).warm_up is LLMCore.warm_up else core.warm_up()
            ),
        )

    def _until_healthy(self, core: LLMCore) -> None:
        began, pause = time.monotonic(), _MIN_PAUSE_S
        while True:
            try:
                core.run_health_check()
                return
            except Exception as error:  # any error means that the core is not ready
                if time.monotonic() - began + pause > self.readiness_timeout:
                    late = f"core {core.name} is not healthy after {self.readiness_timeout:g} s"
                    raise TimeoutError(f"{late}: {type(error).__name__}: {error}") from error
                _log.info("health check of %s: %s; trying again in %.1f s", core.name, error, pause)
            time.sleep(pause)
            pause = min(1.3 * pause, _MAX_PAUSE_S)


def _each(cores: Sequence[LLMCore], work: Callable[[LLMCore], None]) -> None:
    """Call `work` in a thread for each core; after all have ended, raise the first error."""
    if cores:
        with ThreadPoolExecutor(len(cores), "mpillm-warmup") as pool:
            for future in [pool.submit(work, core) for core in cores]:
                future.result()
