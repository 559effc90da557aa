"""`LLMServer`: distributes requests over cores."""

from __future__ import annotations

from collections.abc import Callable

from mpillm.llmlib.cores.base import LLMCore, LLMRequest, warm_up_requests
from mpillm.llmlib.utils import LLMServerProgressDisplay
from mpillm.llmlib.warmup import WarmupManager
from mpillm.nvidia import backends
from mpillm.workloads import Workload


class LLMServer:
    """Cores, and the selection of the next request's core. `LLMServerFactory.create_server` creates one."""

    def __init__(
        self,
        cores: list[LLMCore],
        scheduler: Callable[[], LLMCore],
        progress_display: LLMServerProgressDisplay,
        harness_config: backends.HarnessConfig,
        workload: Workload | None,
        warmup_manager: WarmupManager,
        verbose: bool = False,
        verbose_nvtx: bool = False,
    ) -> None:
        """`scheduler`: chooses the core of the next request."""
        self.cores = cores
        self.get_next_core = scheduler
        self.progress_display = progress_display
        self.harness_config = harness_config
        self.wl = workload
        self.warmup_manager = warmup_manager
        self.verbose = verbose
        self.verbose_nvtx = verbose_nvtx
        self.sample_count = 0  # issued

    def warm_up(self, warmup_iters: int | None = None) -> None:
        """Wait until all cores are healthy, and answer `warmup_iters` requests on each.

        None: the maximum of the cores' `get_num_warmup_iters`.
        """
        n = max(core.get_num_warmup_iters() for core in self.cores) if warmup_iters is None else warmup_iters
        self.warmup_manager.warmup(self.cores, warm_up_requests(n))

    def issue_queries(self, query_samples: list[LLMRequest]) -> None:
        """Assign requests to cores, and enqueue each core's requests in one call, without a wait."""
        batches: dict[LLMCore, list[LLMRequest]] = {}
        for query in query_samples:
            core = self.get_next_core()
            core.n_assigned += 1  # otherwise the core with the fewest requests gets the whole batch
            batches.setdefault(core, []).append(query)
        for core, queries in batches.items():
            core.n_assigned = 0
            self.sample_count += core.enqueue(queries)
        self.progress_display.update_total(self.sample_count)

    def flush_queries(self) -> None:
        """Wait until all requests are answered. Raises RuntimeError for a failed core."""
        for core in self.cores:
            core.flush()

    def stop_work(self) -> None:
        """Answer open requests, and end all cores, even if one fails."""
        try:
            for core in self.cores:
                core.notify_stop()
            self.flush_queries()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """End the cores, and drop open requests."""
        for core in self.cores:
            core.end(abandon=True)
        self.progress_display.finish()
        self.cores.clear()
