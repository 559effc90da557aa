"""Reads servers' counts periodically during a test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from mpillm.cores.base import Metrics
from mpillm.cores.openai_client.endpoint import RemoteServer
from mpillm.cores.openai_client.server_counts import MAX_READ_S, ServerCounts, grown, read_one

_READ_S, _READ_RARELY_S = 1.0, 30.0  # between readings, if any server has counts, or if none has
_FRESH_S = 5.0  # the time for which a reading is valid

_MAX_REREADS, _REREAD_S = 4, 0.25  # of counts that a server updates shortly after its answers

Read = Callable[[RemoteServer], Awaitable[ServerCounts]]


def _lags(server: RemoteServer, before: ServerCounts, after: ServerCounts) -> bool:
    """Return whether a server has counted fewer tokens than this client received from it."""
    counted = grown([before], [after]).get("generated_tokens")
    return counted is not None and counted < server.tally.generated_tokens


class ServerReader:
    """Used on the client's event loop, except `start`, `counted`, `is_over` and `metrics`."""

    def __init__(
        self, servers: Sequence[RemoteServer], contexts: Sequence[RemoteServer] = (), read: Read = read_one
    ) -> None:
        """`contexts`: context servers for `servers`."""
        self._servers = [*servers, *contexts]
        self._n = len(servers)
        self._read = read
        self._before: list[ServerCounts] = []  # at the start of the test
        self._latest: tuple[float, list[ServerCounts]] = 0.0, []  # time and counts of the last reading
        self._task: asyncio.Task[None] | None = None
        self.by_server: dict[str, dict[str, float]] = {}
        """Growth of each server's counts at the last `counted`, by URL; without servers that report none."""
        self.is_over = False
        """Whether the test is over. `counted` then waits for the final counts."""

    @property
    def reads(self) -> list[str]:
        """URLs of the servers."""
        return [one.url for one in self._servers]

    def start(self, run: Callable[[Coroutine[Any, Any, None], float], object]) -> None:
        """Start the readings, before the test. `run`, as in `counted`, waits for the first reading."""
        run(self._start(), MAX_READ_S + 60)

    async def _start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._go_on())
        while not self._before and not self._task.done():
            await asyncio.sleep(0.01)

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def begin_again(self, server: RemoteServer) -> None:
        """Read `server` from now on, instead of the first server."""
        before = await self._read(server)
        self._servers[0] = server
        if self._before:
            self._before[0] = before

    def counted(
        self, run: Callable[[Coroutine[Any, Any, list[ServerCounts]], float], Any]
    ) -> dict[str, float]:
        """Return the growth of the servers' counts in the test: `server_…`, `server_context_…`.

        The latter are of context servers. `server_silent`: number of servers without counts at the start of
        the test or now. During the test, the last reading counts. After the test, `run(work, seconds)` waits
        at most so many seconds for the final counts.
        """
        after = run(self._last(), MAX_READ_S + 60) if self.is_over else self._latest[1]
        if not (self._before and after):
            return {}
        self.by_server = {
            server.url: grown([one], [other])
            for server, one, other in zip(self._servers, self._before, after, strict=True)
            if ServerCounts() not in (one, other)
        }
        n = self._n
        contexts = grown(self._before[n:], after[n:])
        counts = grown(self._before[:n], after[:n]) | {f"context_{name}": by for name, by in contexts.items()}
        if silent := sum(ServerCounts() in pair for pair in zip(self._before, after, strict=True)):
            counts["silent"] = silent
        return {f"server_{name}": by for name, by in counts.items()}

    async def _last(self) -> list[ServerCounts]:
        if self._task is None:  # no test has begun
            return []
        readings = await self._all()
        for _ in range(_MAX_REREADS):
            if not any(map(_lags, self._servers, self._before, readings)):
                break
            await asyncio.sleep(_REREAD_S)
            readings = await self._all()
        return readings

    def metrics(self, own: Metrics, *, is_only_client: bool) -> Metrics:
        """Return the servers' metrics, in place of the client's `own`.

        `is_only_client`: if False, only the KV cache usage is the servers'.
        """
        at, readings = self._latest[0], self._latest[1][: self._n]
        usage = max((one.kv_cache_usage for one in readings if one.kv_cache_usage is not None), default=None)
        if not is_only_client or len(readings) != 1 or time.perf_counter() - at > _FRESH_S:
            return own._replace(kv_cache_usage=usage)
        counted = grown(self._before[:1], readings)
        (now,) = readings
        # Some servers count an answer's tokens only at its end.
        return Metrics(
            int(max(counted.get("prompt_tokens", 0.0), own.prompt_tokens)),
            int(max(counted.get("generated_tokens", 0.0), own.generated_tokens)),
            own.running if now.running is None else int(now.running),
            own.waiting if now.waiting is None else int(now.waiting),
            usage,
        )

    async def _all(self) -> list[ServerCounts]:
        return await asyncio.gather(*map(self._read, self._servers))

    async def _go_on(self) -> None:
        while True:
            readings = await self._all()
            self._before = self._before or readings
            self._latest = time.perf_counter(), readings
            has_counts = any(reading != ServerCounts() for reading in readings)
            await asyncio.sleep(_READ_S if has_counts else _READ_RARELY_S)
