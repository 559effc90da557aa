"""Reads what servers count, again and again while a test lasts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from mpillm.cores.base import Metrics
from mpillm.cores.openai_client.endpoint import Endpoint
from mpillm.cores.openai_client.server_counts import MOST_S, Reading, grown, read_one

_READ_S, _READ_RARELY_S = 1.0, 30.0  # between readings of servers that say something, and of others
_FRESH_S = 5.0  # how long a reading counts

_MAX_REREADS, _REREAD_S = 4, 0.25  # of counts that a server updates shortly after its answers

Read = Callable[[Endpoint], Awaitable[Reading]]


def _lags(server: Endpoint, before: Reading, after: Reading) -> bool:
    """Return whether a server has counted fewer tokens than this client received from it."""
    counted = grown([before], [after]).get("generated_tokens")
    return counted is not None and counted < server.tally.generated_tokens


class ServerReader:
    """Belongs to the client's loop, but for `start`, `counted`, `is_over` and `metrics`."""

    def __init__(
        self, servers: Sequence[Endpoint], contexts: Sequence[Endpoint] = (), read: Read = read_one
    ) -> None:
        """`contexts`: servers that compute contexts for `servers`."""
        self._servers = [*servers, *contexts]
        self._n = len(servers)
        self._read = read
        self._before: list[Reading] = []  # what they had counted when the test began
        self._latest: tuple[float, list[Reading]] = 0.0, []  # when they were last read, and what they said
        self._task: asyncio.Task[None] | None = None
        self.by_server: dict[str, dict[str, float]] = {}
        """Growth of each server's counts at the last `counted`, by URL; without servers that gave none."""
        self.is_over = False
        """The test is: what they have counted is worth waiting for."""

    @property
    def reads(self) -> list[str]:
        """URLs of the servers."""
        return [one.url for one in self._servers]

    def start(self, run: Callable[[Coroutine[Any, Any, None], float], object]) -> None:
        """Read them from now on, before the test; `run` waits for what they have counted, as in `counted`."""
        run(self._start(), MOST_S + 60)

    async def _start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._go_on())
        while not self._before and not self._task.done():
            await asyncio.sleep(0.01)

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def begin_again(self, server: Endpoint) -> None:
        """Read `server` from now on, in the first one's place."""
        before = await self._read(server)
        self._servers[0] = server
        if self._before:
            self._before[0] = before

    def counted(self, run: Callable[[Coroutine[Any, Any, list[Reading]], float], Any]) -> dict[str, float]:
        """Return by how much their counts have grown in the test, as `server_…`; those of contexts as
        `server_context_…`. `server_silent`: how many said nothing, then or now.

        Once the test is over `run` waits for what they say then, so many seconds at most; before, it is what
        they said last.
        """
        after = run(self._last(), MOST_S + 60) if self.is_over else self._latest[1]
        if not (self._before and after):
            return {}
        self.by_server = {
            server.url: grown([one], [other])
            for server, one, other in zip(self._servers, self._before, after, strict=True)
            if Reading() not in (one, other)
        }
        n = self._n
        contexts = grown(self._before[n:], after[n:])
        counts = grown(self._before[:n], after[:n]) | {f"context_{name}": by for name, by in contexts.items()}
        if silent := sum(Reading() in pair for pair in zip(self._before, after, strict=True)):
            counts["silent"] = silent
        return {f"server_{name}": by for name, by in counts.items()}

    async def _last(self) -> list[Reading]:
        if self._task is None:  # no test has begun
            return []
        readings = await self._all()
        for _ in range(_MAX_REREADS):
            if not any(map(_lags, self._servers, self._before, readings)):
                break
            await asyncio.sleep(_REREAD_S)
            readings = await self._all()
        return readings

    def metrics(self, mine: Metrics, *, asks_alone: bool) -> Metrics:
        """Return what they say, in place of `mine`, what the client knows.

        `asks_alone`: nobody else asks them; otherwise their KV caches alone are what they say.
        """
        at, readings = self._latest[0], self._latest[1][: self._n]
        usage = max((one.kv_cache_usage for one in readings if one.kv_cache_usage is not None), default=None)
        if not asks_alone or len(readings) != 1 or time.perf_counter() - at > _FRESH_S:
            return mine._replace(kv_cache_usage=usage)
        counted = grown(self._before[:1], readings)
        (now,) = readings
        # Some servers count an answer's tokens at its end.
        return Metrics(
            int(max(counted.get("prompt_tokens", 0.0), mine.prompt_tokens)),
            int(max(counted.get("generated_tokens", 0.0), mine.generated_tokens)),
            mine.running if now.running is None else int(now.running),
            mine.waiting if now.waiting is None else int(now.waiting),
            usage,
        )

    async def _all(self) -> list[Reading]:
        return await asyncio.gather(*map(self._read, self._servers))

    async def _go_on(self) -> None:
        while True:
            readings = await self._all()
            self._before = self._before or readings
            self._latest = time.perf_counter(), readings
            says = any(reading != Reading() for reading in readings)
            await asyncio.sleep(_READ_S if says else _READ_RARELY_S)
