"""Role of an instance's root rank: receive requests, and return responses."""

from __future__ import annotations

import logging
import math
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mpillm.comms.messages import DONE, DROP, GRANT, RESET_CACHE, RESPONSE, WORK, Batch, Grant, ResponseFlag
from mpillm.cores.base import LLMCore, Metrics
from mpillm.cores.capabilities import NamesFrameworks, OutlivesServer, RecordsSteps, ResetsPrefixCache
from mpillm.phases import Phase
from mpillm.roles.follower import FollowerRole
from mpillm.telemetry.recorder import Clock, Kind, Recorder, SpanTracker

if TYPE_CHECKING:  # at run time, this import would start MPI
    from mpillm.comms.transport import Transport

_log = logging.getLogger(__name__)
_FINAL = int(ResponseFlag.FINAL)  # a plain int: with an enum flag, NumPy takes three times as long
_MEASURE_S = 0.5  # the usual interval of heartbeats, which carry the metrics to rank 0
_LOG_S = 10.0


class InstanceRole(FollowerRole):
    """Role of an instance's root rank: exchanges messages with the leader.

    An instance that computes contexts and generates (an executor) uses this class itself. Context and
    generation instances use subclasses.
    """

    works_on: Kind = "busy"
    """Kind of the spans recorded while requests are open, if the core does not record its steps."""

    def __init__(
        self, core: LLMCore, route: Transport, leader: int, instance: int, clock: Clock = time.perf_counter
    ) -> None:
        """`leader`: the leader's rank."""
        super().__init__(core)
        self._route = route
        self._leader = leader
        self._instance, self._clock = instance, clock
        self._in_test = False  # False: all requests are warm-up requests, which bypass the leader
        self._warming: set[int] = set()
        # In the test:
        self._n_outstanding = 0  # requests
        self._samples = 0
        self._tokens = 0
        self._test_started = 0.0
        self._measure_at = self._log_at = math.inf
        self._measured: tuple[float, Metrics] | None = None  # time and metrics
        self._open: SpanTracker | None = None  # tracks when requests are open
        WORK.handle(route, self._on_work)
        DROP.handle(route, self._on_drop)
        RESET_CACHE.handle(route, self._on_reset)

    # --- phases ---

    def warmup(self) -> None:
        requests = self._core.warm_up_requests()
        self._warming = set(requests.rows["id"].tolist())
        self._core.enqueue(requests)

    def ready(self) -> None:
        self._in_test = True
        super().ready()
        GRANT.send(self._route, self._leader, Grant(*self._core.credits()))

    def test(self) -> None:
        self._test_started = self._clock()
        self._measure_at, self._log_at = self._test_started, self._test_started + _LOG_S

    def done(self, phase: Phase) -> bool:
        return not self._warming

    def doing(self) -> str:
        open_ = len(self._warming)
        return ", ".join(filter(None, (f"{open_} requests open" if open_ else "", super().doing())))

    def record(self, recorder: Recorder) -> None:
        super().record(recorder)
        if not isinstance(self._core, RecordsSteps):
            self._open = recorder.track(partial(recorder.busy, self.works_on))

    def stop(self) -> None:
        self._measure_at = math.inf  # a stopped core cannot be measured
        super().stop()

    def measured(self) -> tuple[float, Metrics] | None:
        if self._measured is None:
            return None
        (at, metrics), now = self._measured, self._clock()
        # The heartbeat's thread calls this. Usually the main thread has read the metrics within the last
        # second. If it has not, for example during a long step, the last metrics are reported with the
        # current time.
        return (now if now - at > 2 * _MEASURE_S else at) - self._test_started, metrics

    def report(self) -> dict[str, Any]:
        return {
            **super().report(),
            "instance": self._instance,
            "samples": self._samples,
            "tokens": self._tokens,
            "test_s": self._clock() - self._test_started,
            "metrics": self._core.metrics(),
            "streamed": self._core.streams,
            **self._core.statistics(),
            **({"frameworks": self._core.frameworks()} if isinstance(self._core, NamesFrameworks) else {}),
        }

    # --- work ---

    def poll(self) -> bool:
        now = self._clock()
        if self._open is not None:
            self._open.update(self._n_outstanding > 0, now)
        if now >= self._measure_at:
            self._measure(now)
            if isinstance(self._core, OutlivesServer) and self._core.waits_for_server:
                # Without ids, this sends an empty message. It tells the leader that this instance is not
                # stalled: it only waits for its server.
                self._send_flag([], ResponseFlag.FINAL)
        if not self._core.has_work():
            return False
        responses = self._core.poll_responses()
        if responses is not None and len(responses):
            self._on_responses(responses)
        return True

    def _measure(self, now: float) -> None:
        """Read the core's metrics, which the next heartbeat carries to rank 0."""
        self._measure_at = now + _MEASURE_S
        metrics = self._core.metrics()
        if metrics is None:
            return
        self._measured = now, metrics
        if now >= self._log_at:
            self._log_at = now + _LOG_S
            usage = "" if metrics.kv_cache_usage is None else f", KV cache {metrics.kv_cache_usage:.0%} full"
            _log.info(
                "%.0f s of the test: %d prompt tokens and %d answer tokens computed,"
                " %d requests running, %d waiting%s",
                *(now - self._test_started, *metrics[:4], usage),
            )

    def _on_work(self, source: int, requests: Batch) -> None:
        self._n_outstanding += len(requests)
        self._enqueue(requests)

    def _enqueue(self, requests: Batch) -> None:
        self._core.enqueue(requests)

    def _on_drop(self, source: int, ids: list[int]) -> None:
        self._core.cancel(ids)
        self._send_flag(ids, ResponseFlag.CANCEL_DONE)

    def _on_reset(self, source: int, _: None) -> None:
        if isinstance(self._core, ResetsPrefixCache):
            self._core.reset_prefix_cache()

    def _send_flag(self, ids: list[int], flag: ResponseFlag) -> None:
        """Send the leader one row with `flag`, without tokens, for each of these requests."""
        rows = np.zeros(len(ids), RESPONSE)
        rows["id"] = ids
        rows["flags"] = flag
        DONE.send(self._route, self._leader, Batch(rows, np.zeros(0, np.int32)))

    def _on_responses(self, responses: Batch) -> None:
        rows = responses.rows
        final = (rows["flags"] & _FINAL) != 0
        if not self._in_test:
            self._warming.difference_update(rows["id"][final].tolist())
            return
        self._ended(int(final.sum()))
        self._tokens += self._own_tokens(rows, final)
        DONE.send(self._route, self._leader, responses)

    def _ended(self, n_requests: int) -> None:
        """Count requests that this instance has finished."""
        self._n_outstanding -= n_requests
        self._samples += n_requests

    def _own_tokens(self, rows: NDArray[np.void], final: NDArray[np.bool_]) -> int:
        """Return the number of tokens that this instance generated.

        `final`: which rows have FINAL. Only these count, because each has the complete response.
        """
        return int(rows["n_tokens"][final].sum())
