"""`LLMServerFactory`: a server with all its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlperf_loadgen as lg
import numpy as np

from disagg.errors import ConfigError
from mpillm.cores.registry import BackendRegistry
from mpillm.llmlib.config import HarnessConfig
from mpillm.llmlib.cores.base import CompleteCallback, LLMCore
from mpillm.llmlib.cores.built_in import built_in
from mpillm.llmlib.server import LLMServer
from mpillm.llmlib.utils import LLMServerProgressDisplay
from mpillm.llmlib.warmup import WarmupManager
from mpillm.workloads import Workload


def complete_loadgen_request(request_id: int, output_tokens: Sequence[int], is_first_token: bool) -> None:
    """Report a sample's first token, or its whole answer, to LoadGen."""
    tokens = np.ascontiguousarray(output_tokens, np.uint32)
    complete = lg.FirstTokenComplete if is_first_token else lg.QuerySamplesComplete
    complete([lg.QuerySampleResponse(request_id, tokens.ctypes.data, tokens.nbytes, len(tokens))])


class LLMServerFactory:
    """Factory of servers."""

    @staticmethod
    def create_server(
        backend_type: str | type[LLMCore],
        workload: Workload | None = None,
        disable_progress_display: bool = False,
        verbose: bool = False,
        verbose_nvtx: bool = False,
        *,
        complete_callback: CompleteCallback = complete_loadgen_request,
        core_indices: Iterable[int] | None = None,
        **backend_kwargs: Any,
    ) -> LLMServer:
        """Create a server: cores (all, or `core_indices`), scheduler, progress display, warm-up.

        `backend_type`: a class, or its name in `BackendRegistry`. Raises ConfigError if it is not an
        `LLMCore` of this package, or the policy needs ranks.
        """
        backend = backend_class(backend_type)
        config = HarnessConfig()
        policy = config.traffic_distribution_policy
        if policy not in _SCHEDULERS:
            raise ConfigError(
                f"--traffic_distribution_policy {policy}: LLMServer has {', '.join(_SCHEDULERS)}",
                about=["traffic_distribution_policy"],
            )
        display = LLMServerProgressDisplay(
            enable_render=not disable_progress_display, steady=config.show_steady_state_progress
        )
        if core_indices is None:
            core_indices = range(n_cores(backend, backend_kwargs))
        cores: list[LLMCore] = []
        for index in core_indices:
            values = backend.get_config_for_core(
                core_index=index,
                complete_callback=complete_callback,
                progress_display=display,
                verbose=verbose,
                verbose_nvtx=verbose_nvtx,
                **backend_kwargs,
            )
            cores.append(backend(**values))
        scheduler = _SCHEDULERS[policy](cores)
        return LLMServer(cores, scheduler, display, config, workload, WarmupManager(), verbose, verbose_nvtx)


def backend_class(backend_type: str | type[LLMCore]) -> type[LLMCore]:
    """Return the class of a name. A class of this package wraps mpillm's own cores."""
    if isinstance(backend_type, type):
        return backend_type
    backend: type[LLMCore] | None = getattr(BackendRegistry.get(backend_type), "backend", None)
    return backend or built_in(backend_type)


def n_cores(backend: type[LLMCore], backend_kwargs: dict[str, Any]) -> int:
    """Return the result of `get_num_cores_for_workload`. Raises ConfigError if it is less than 1."""
    n = backend.get_num_cores_for_workload(**backend_kwargs)
    if not isinstance(n, int) or n < 1:
        raise ConfigError(f"{backend.__name__}.get_num_cores_for_workload() gave {n!r}; must be at least 1")
    return n


def _round_robin(cores: Sequence[LLMCore]) -> Callable[[], LLMCore]:
    turn = -1

    def choose() -> LLMCore:
        nonlocal turn
        turn = (turn + 1) % len(cores)
        return cores[turn]

    return choose


def _load_balancing(cores: Sequence[LLMCore]) -> Callable[[], LLMCore]:
    return lambda: min(cores, key=lambda core: core.get_num_pending_samples() + core.n_assigned)


_SCHEDULERS = {"round_robin": _round_robin, "load_balancing": _load_balancing}
