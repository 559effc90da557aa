"""What all instances do: bring a core up, take requests, give responses. `executor` is this and no more; `ctx` and `gen` hand over."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from mpillm.comms.tags import Tag
from mpillm.comms.transport import Received, Transport
from mpillm.cores.base import LLMCore
from mpillm.messages import Batch, ResponseFlag
from mpillm.roles.base import Role


class InstanceRole(Role):
    """One rank of an instance; its leader talks on the route."""

    def __init__(self, core: LLMCore, route: Transport | None, leader: int, instance: int) -> None:
        """`leader`: the leader's rank in the route communicator."""
        self._core = core
        self._route = route
        self._leader = leader
        self._instance = instance
        self._in_test = False  # until then all requests are of the warm-up, of which the leader is not told
        self._warming: set[int] = set()
        self._owed = 0
        self._samples = 0
        self._tokens = 0
        self._busy_s = 0.0
        self._polled = 0.0
        self._test_started = 0.0
        if route is not None:
            route.handlers[Tag.WORK] = self._on_work

    # --- phases ---

    def load(self) -> None:
        self._core.load()

    def health(self) -> None:
        self._core.run_health_check()

    def warmup(self) -> None:
        if self._route is not None:
            requests = self._core.warm_up_requests()
            self._warming = set(requests.rows["id"].tolist())
            self._core.enqueue(requests)

    def ready(self) -> None:
        self._in_test = True
        self._core.start_test()
        if self._route is not None:
            self._route.send(self._leader, Tag.GRANT, np.array(self._core.credits(), np.int64).view(np.uint8))

    def test(self) -> None:
        self._test_started = self._polled = time.perf_counter()

    def drain(self) -> None:
        self._core.flush()

    def stop(self) -> None:
        self._core.notify_stop()

    def done(self, phase: str) -> bool:
        return not self._warming

    def report(self) -> dict[str, Any]:
        if self._route is None:  # the instance's leader reports for all of it
            return {}
        lasted = time.perf_counter() - self._test_started
        return {
            "instance": self._instance,
            "samples": self._samples,
            "tokens": self._tokens,
            "busy_s": self._busy_s,
            "test_s": lasted,
            **self._core.statistics(),
        }

    # --- work ---

    def poll(self) -> bool:
        now = time.perf_counter()
        if self._owed:
            self._busy_s += now - self._polled
        self._polled = now
        if not self._core.has_work():
            return False
        responses = self._core.poll_responses()
        if responses is not None and len(responses):
            self._on_responses(responses)
        return True

    def _on_work(self, received: Received) -> None:
        requests, _ = Batch.unpack(received.buffer)
        self._owed += len(requests)
        self._enqueue(requests)

    def _enqueue(self, requests: Batch) -> None:
        self._core.enqueue(requests)

    def _on_responses(self, responses: Batch) -> None:
        final = (responses.rows["flags"] & ResponseFlag.FINAL) != 0
        if not self._in_test:
            self._warming.difference_update(responses.rows["id"][final].tolist())
            return
        n_final = int(final.sum())
        self._owed -= n_final
        self._samples += n_final
        self._tokens += int(responses.rows["n_tokens"][final].sum())
        self._send(responses)

    def _send(self, responses: Batch) -> None:
        if self._route is not None:
            self._route.send(self._leader, Tag.DONE, responses.pack())
