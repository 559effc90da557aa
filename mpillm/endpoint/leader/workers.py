"""The servers that a disaggregated leader fronts: which exist, which answer, and who gets a request."""

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
_ASK_S = 0.5  # between two health checks before a server is ready
_LOOK_S = 5.0  # and afterwards
_ANSWER_S = 5.0  # for one health check
# The servers say themselves when they have no room.
_MOST_REQUESTS, _MOST_TOKENS = 1 << 32, 1 << 40


class Worker:
    """A context or a generation server."""

    def __init__(self, instance: ServedInstance) -> None:
        self.name = instance.name
        self.kind = instance.kind
        self.base = f"http://{instance.url}"
        self.gone = "no answer yet"  # why it is not well; empty while it is
        self.gone_at = 0.0  # time.monotonic()
        self.running = 0  # requests that are there
        self.n_requests = 0  # placed there so far
        self._was_ready = False

    def lose(self, why: str) -> None:
        """Note that it does not answer; it gets no requests until it does."""
        if not self.gone:
            self.gone_at = time.monotonic()
            if self._was_ready:
                _log.warning("%s does not answer: %s", self.name, why)
        self.gone = why

    async def check(self, session: aiohttp.ClientSession) -> bool:
        """Check its health; return whether it is well."""
        try:
            async with session.get(
                f"{self.base}/health",
                timeout=aiohttp.ClientTimeout(total=_ANSWER_S),
                allow_redirects=False,
            ) as answer:
                if answer.status == 200:
                    if self.gone and self._was_ready:
                        _log.warning("%s answers again", self.name)
                    self.gone, self._was_ready = "", True
                    return True
                self.lose(f"its health check says {answer.status}")
        except (OSError, asyncio.TimeoutError, aiohttp.ClientError) as error:
            self.lose(reason(error))
        return False


class Place(NamedTuple):
    """A request's place at a server, until the server has answered."""

    worker: Worker
    position: int
    need: int


class Pool:
    """The servers of one kind, and the policy that picks one of them."""

    def __init__(self, kind: str, workers: Sequence[Worker], router: InstancePool) -> None:
        """`router`: for as many instances."""
        self.kind = kind
        self.workers = workers
        self._router = router
        for position in range(len(workers)):
            router.grant(position, _MOST_REQUESTS, _MOST_TOKENS)

    def take(self, prompt: NDArray[np.int32], n_output: int, tried: Sequence[Worker]) -> Place | None:
        """Place a request at a server that answers and is not in `tried`; return None without one.

        `prompt`: tokens, or what stands for them, such as a text's bytes.
        """
        router, need = self._router, len(prompt) + n_output
        closed = [i for i, worker in enumerate(self.workers) if worker.gone or worker in tried]
        for position in closed:
            router.grant(position, -_MOST_REQUESTS, 0)
        rows = np.zeros(1, REQUEST)
        rows["n_tokens"] = len(prompt)
        taken = router.assign(np.array([need]), Batch(rows, prompt))
        for position in closed:
            router.grant(position, _MOST_REQUESTS, 0)
        if not len(taken):
            return None
        worker = self.workers[taken[0]]
        worker.running += 1
        worker.n_requests += 1
        return Place(worker, int(taken[0]), need)

    def give_back(self, place: Place) -> None:
        """Note that the server has answered, or never will."""
        place.worker.running -= 1
        self._router.return_credits(np.array([place.position]), np.array([place.need]))

    def all_gone(self) -> str:
        """Return why no server of this kind answers; empty if one does."""
        if any(not worker.gone for worker in self.workers):
            return ""
        return "; ".join(f"{worker.name} does not answer: {worker.gone}" for worker in self.workers)

    def gone_for(self) -> float:
        """Return the seconds since the last server of this kind answered; 0 if one does."""
        if not self.all_gone():
            return 0.0
        return time.monotonic() - max(worker.gone_at for worker in self.workers)


def new_session() -> aiohttp.ClientSession:
    """Return what servers are asked by: on as many connections as it takes, and without their cookies."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
    )


async def wait_ready(
    session: aiohttp.ClientSession, workers: Sequence[Worker], deadline_s: float, tell: Callable[[str], None]
) -> list[Worker]:
    """Wait until every server is well; return those that are not after `deadline_s`."""
    began = time.monotonic()

    async def one(worker: Worker) -> None:
        while not await worker.check(session):
            await asyncio.sleep(_ASK_S)
        tell(f"{worker.name} is ready after {time.monotonic() - began:.1f} s")

    tasks = {asyncio.ensure_future(one(worker)): worker for worker in workers}
    _, late = await asyncio.wait(tasks, timeout=deadline_s)
    for task in late:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    unready = {tasks[task].name for task in late}
    return [worker for worker in workers if worker.name in unready]


async def watch(session: aiohttp.ClientSession, workers: Sequence[Worker]) -> None:
    """Check their health until cancelled."""
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
