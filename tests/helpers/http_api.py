"""The API over real sockets, before the roles of a run in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientResponse, ClientSession

from mpillm.data.dataset import PromptLimits
from mpillm.data.tokenizer import ByteTokenizer
from mpillm.endpoint.admission import Guard
from mpillm.endpoint.app import Service
from mpillm.endpoint.connections import Connections
from mpillm.endpoint.http_thread import bind, listen, url
from mpillm.endpoint.protocol import ServedModel
from tests.helpers.ports import free_port
from tests.helpers.served import World

DEADLINE_S = 120.0
SERVED = ServedModel(("dummy", "other"), ByteTokenizer(), PromptLimits(vocab_size=256, max_seq_len=200))
HOUR_MS = 3_600_000.0


class Letters(ByteTokenizer):
    """Makes every token a letter, so that the dummy core's answers are text."""

    def decode(self, tokens: Any, keep_special: bool = False) -> str:
        return "".join(chr(ord("a") + int(token) % 26) for token in tokens)


class Api:
    """Holds a client, and what it talks to."""

    def __init__(self, world: World, service: Service, session: ClientSession, base: str) -> None:
        self.world, self.service, self.session, self.base = world, service, session, base

    async def post(self, path: str, body: Any, **headers: str) -> ClientResponse:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.session.post(self.base + path, data=data, headers=headers)

    async def answer(self, path: str, **body: Any) -> dict[str, Any]:
        async with await self.post(path, body) as response:
            made: dict[str, Any] = await response.json()
            assert response.status == 200, made
            return made

    async def events(self, path: str, **body: Any) -> list[Any]:
        """Return the chunks of a stream, without the mark of its end."""
        async with await self.post(path, {**body, "stream": True}) as response:
            assert response.status == 200 and response.content_type == "text/event-stream"
            lines = (await response.text()).split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]

    async def error(self, status: int, path: str, body: Any, **headers: str) -> dict[str, Any]:
        async with await self.post(path, body, **headers) as response:
            text = await response.text()
            assert response.status == status, text
            error: dict[str, Any] = json.loads(text)["error"]
            assert sorted(error) == ["code", "message", "param", "type"] and error["message"]
            return error

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.002)

    async def idle(self) -> None:
        """Wait until no rank holds anything of any request."""
        await self.until(lambda: len(self.world.open) == 0 and not self.service.guard.active)
        self.world.settle()
        self.world.check_unused()


@asynccontextmanager
async def api(
    disaggregated: bool = False,
    served: ServedModel = SERVED,
    core: dict[str, Any] | None = None,
    api_key: str | None = None,
    max_body_bytes: int = 1 << 24,
    host: str = "0.0.0.0",
    connections: Connections | None = None,
    idle_s: float = 120.0,
    body_s: float = 120.0,
    **options: Any,
) -> AsyncIterator[Api]:
    world = World(7, disaggregated, **core or {})
    service = Service(served, world.open, guard=Guard(api_key, max_body_bytes, host, body_s), **options)
    bound = bind("127.0.0.1", free_port())
    runner, _ = await listen(service.app(), bound, connections, idle_s)

    async def turn() -> None:
        while True:
            for _ in range(30):
                world.turn()
            await asyncio.sleep(0)

    turning = asyncio.ensure_future(turn())
    try:
        async with ClientSession() as session:
            yield Api(world, service, session, url(bound).removesuffix("/v1"))
    finally:
        turning.cancel()
        await asyncio.gather(turning, return_exceptions=True)
        await runner.cleanup()


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), DEADLINE_S))


BOTH = pytest.mark.parametrize("disaggregated", [False, True])
ROUTES = pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])


def body_for(path: str, text: str = "hello") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
