"""The servers behind a disaggregated leader: their health, and the choice of a server for a request."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import aiohttp
import numpy as np
from numpy.typing import NDArray

from disagg.instances import ServedInstance
from launch.safe_text import one_line
from mpillm.comms.messages import REQUEST, Batch
from mpillm.roles.pool import InstancePool

_log = logging.getLogger(__name__)
_READY_POLL_S = 0.5  # time between two health checks before a server is ready
_LOOK_S = 5.0  # time between two health checks afterwards
_ANSWER_S = 5.0  # time limit of one health check
# So large that they never limit: a server without capacity refuses requests itself.
_MAX_REQUESTS, _MAX_TOKENS = 1 << 32, 1 << 40


class Worker:
    """A context or a generation server."""

    def __init__(self, instance: ServedInstance) -> None:
        self.name = instance.name
        self.kind = instance.kind
        self.base = f"http://{instance.url}"
        self.failure = "no answer yet"  # why the server is not healthy; empty while it is healthy
        self.failed_at = 0.0  # when it became unhealthy, time.monotonic()
        self.running = 0  # requests at the server
        self.n_requests = 0  # requests sent to the server so far
        self._was_ready = False

    def lose(self, why: str) -> None:
        """Record that the server does not answer: it gets no requests until it answers again."""
        if not self.failure:
            self.failed_at = time.monotonic()
            if self._was_ready:
                _log.warning("%s does not answer: %s", self.name, why)
        self.failure = why

    async def check(self, session: aiohttp.ClientSession) -> bool:
        """Check the server's health; return whether the server is healthy."""
        try:
            async with session.get(
                f"{self.base}/health",
                timeout=aiohttp.ClientTimeout(total=_ANSWER_S),
                allow_redirects=False,
            ) as answer:
                if answer.status == 200:
                    if self.failure and self._was_ready:
                        _log.warning("%s answers again", self.name)
                    self.failure, self._was_ready = "", True
                    return True
                self.lose(f"its health check returns {answer.status}")
        except (OSError, asyncio.TimeoutError, aiohttp.ClientError) as error:
            self.lose(reason(error))
        return False


class Assignment(NamedTuple):
    """The server of a request, until the server has answered."""

    worker: Worker
    position: int
    need: int


class Pool:
    """The servers of one kind, and the policy that picks one of them."""

    def __init__(self, kind: str, workers: Sequence[Worker], router: InstancePool) -> None:
        """`router`: picks among as many instances as there are workers."""
        self.kind = kind
        self.workers = workers
        self._router = router
        for position in range(len(workers)):
            router.grant(position, _MAX_REQUESTS, _MAX_TOKENS)

    def take(
        self, prompt: NDArray[np.int32], n_output: int, tried: Sequence[Worker], session: int = 0
    ) -> Assignment | None:
        """Assign a request to a healthy server that is not in `tried`; return None if there is none.

        `prompt`: tokens, or a substitute such as a text's bytes; `session`: see `session_of`.
        """
        router, need = self._router, len(prompt) + n_output
        closed = [i for i, worker in enumerate(self.workers) if worker.failure or worker in tried]
        for position in closed:
            router.grant(position, -_MAX_REQUESTS, 0)
        rows = np.zeros(1, REQUEST)
        rows["n_tokens"], rows["session"] = len(prompt), session
        positions = router.assign(np.array([need]), Batch(rows, prompt))
        for position in closed:
            router.grant(position, _MAX_REQUESTS, 0)
        if not len(positions):
            return None
        worker = self.workers[positions[0]]
        worker.running += 1
        worker.n_requests += 1
        return Assignment(worker, int(positions[0]), need)

    def give_back(self, place: Assignment) -> None:
        """Release an assignment: the server has answered, or never will."""
        place.worker.running -= 1
        self._router.return_credits(np.array([place.position]), np.array([place.need]))

    def failures(self) -> str:
        """Return why no server of this kind answers; empty if one does."""
        if any(not worker.failure for worker in self.workers):
            return ""
        return "; ".join(f"{worker.name} does not answer: {worker.failure}" for worker in self.workers)

    def failed_for_s(self) -> float:
        """Return for how many seconds no server of this kind has answered; 0 if one answers."""
        if not self.failures():
            return 0.0
        return time.monotonic() - max(worker.failed_at for worker in self.workers)


def new_session() -> aiohttp.ClientSession:
    """Return the client session for the servers: any number of connections, without cookies."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
    )


async def wait_ready(
    session: aiohttp.ClientSession,
    workers: Sequence[Worker],
    deadline_s: float,
    report: Callable[[str], None],
) -> list[Worker]:
    """Wait until every server is healthy; return the unhealthy servers after `deadline_s`."""
    began = time.monotonic()

    async def one(worker: Worker) -> None:
        while not await worker.check(session):
            await asyncio.sleep(_READY_POLL_S)
        report(f"{worker.name} is ready after {time.monotonic() - began:.1f} s")

    tasks = {asyncio.ensure_future(one(worker)): worker for worker in workers}
    _, late = await asyncio.wait(tasks, timeout=deadline_s)
    for task in late:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    unready = {tasks[task].name for task in late}
    return [worker for worker in workers if worker.name in unready]


async def watch(session: aiohttp.ClientSession, workers: Sequence[Worker]) -> None:
    """Check the servers' health until cancelled."""
    while True:
        await asyncio.sleep(_LOOK_S)
        await asyncio.gather(*(worker.check(session) for worker in workers))


def reason(error: BaseException) -> str:
    """Return why a request failed, in a few words."""
    if isinstance(error, asyncio.TimeoutError):
        return "no answer in time"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "it closed the connection"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return one_line(str(error)) or type(error).__name__
