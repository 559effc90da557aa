"""--profile: start servers' profilers before a test, and stop them after it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from mpillm.cores.openai_client.answer import failure_text
from mpillm.cores.openai_client.endpoint import RemoteServer
from mpillm.cores.openai_client.http_connection import HttpError

START, STOP = "/start_profile", "/stop_profile"
"""Routes of vLLM and SGLang."""
_MISSING = 404
_REMEDY = "; vLLM has this route only with --profiler-config"


class ServerProfilers:
    """The profilers of a client's servers. A failure does not end the run: the result contains it."""

    def __init__(self, servers: Sequence[RemoteServer]) -> None:
        self._servers = servers
        self.running: list[RemoteServer] = []
        self._profiled: list[str] = []
        self._problems: list[str] = []

    async def start(self, limit_s: float) -> None:
        """Start the profilers of all servers, within `limit_s` each."""
        self.running = await self._post(self._servers, START, limit_s)
        self._profiled = [server.url for server in self.running]

    async def stop(self, limit_s: float) -> None:
        """Stop the profilers that were started, within `limit_s` each: servers may write large files."""
        running, self.running = self.running, []
        await self._post(running, STOP, limit_s)

    async def _post(self, servers: Sequence[RemoteServer], path: str, limit_s: float) -> list[RemoteServer]:
        """Return the servers that have answered with success; record the others' problems."""
        problems = await asyncio.gather(*(_problem(server, path, limit_s) for server in servers))
        self._problems += filter(None, problems)
        return [server for server, problem in zip(servers, problems, strict=True) if not problem]

    def values(self) -> dict[str, Any]:
        """Return the URLs of profiled servers, and problems in words, for `result.json`."""
        return {"profiled": self._profiled, "profile_problems": self._problems}


async def _problem(server: RemoteServer, path: str, limit_s: float) -> str:
    """Return why a server has not done what a route stands for; "" if it has."""
    try:
        status, headers, reply = await server.fetch("POST", path, limit_s)
    except HttpError as error:
        return f"{server.url}{path}: {error}"
    if status == 200:
        return ""
    text = failure_text(status, reply, headers.get("location"))
    return f"{server.url}{path}: {text}{_REMEDY if status == _MISSING else ''}"
