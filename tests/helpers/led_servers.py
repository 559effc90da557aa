"""A leader before servers that do what they are told, right or wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import Any

from aiohttp import ClientSession

from disagg.instances import ServedInstance
from mpillm.endpoint.admission import Guard
from mpillm.endpoint.http_thread import bind, listen, url
from mpillm.endpoint.leader.leader_service import LeaderService
from mpillm.endpoint.leader.workers import Pool, Worker, new_session, wait_ready
from mpillm.roles.pool import InstancePool
from tests.helpers.ports import free_port
from tests.helpers.scripted_server import (
    DONE,
    STREAM,
    Reply,
    Request,
    ScriptedServer,
    choice,
    chunk,
    event,
    plain,
)

DEADLINE_S = 120.0
Completions = Callable[[Request], Reply]
BODY = {"prompt": "a text", "max_tokens": 3}


def context(request: Request, reason: str = "not_finished") -> Reply:
    """Answer as a context server, with the `disagg_request_id` of the request."""
    body = request.json
    params = {"request_type": "context_only", "first_gen_tokens": [7], "encoded_opaque_state": "state"}
    params["disagg_request_id"] = body["disaggregated_params"]["disagg_request_id"]
    made = choice([7], "t", reason) | {"prompt_token_ids": [1, 2]}
    made["choices"][0]["disaggregated_params"] = params
    return plain(made)


def generation(request: Request) -> Reply:
    if not request.json.get("stream"):
        return plain(choice([7, 8, 9], "ttt", "length"))
    return Reply([STREAM, chunk(event(choice([7], "t"))), chunk(event(choice([8, 9], "tt", "length"))), DONE])


def answering(reply: Reply) -> Completions:
    return lambda request: reply


class Led:
    """Holds a leader, its servers, and a client."""

    def __init__(self, base: str, session: ClientSession, servers: list[ScriptedServer], names: list[str]):
        self.base, self.session, self.servers, self.names = base, session, servers, names

    async def ask(self, body: Any, path: str = "/v1/completions") -> tuple[int, str]:
        async with self.session.post(self.base + path, json=body) as response:
            return response.status, await response.text()

    async def error(self, status: int, body: Any) -> str:
        found, text = await self.ask(body)
        assert found == status, text
        message: str = json.loads(text)["error"]["message"]
        return message

    def bodies(self, i: int) -> list[dict[str, Any]]:
        return self.servers[i].bodies()


@asynccontextmanager
async def led(
    contexts: Sequence[Completions] = (context,),
    generations: Sequence[Completions] = (generation,),
    router: Callable[[list[int]], InstancePool] = lambda which: InstancePool(which, "round_robin"),
    silence_s: float = 60.0,
    services: list[LeaderService] | None = None,
    guard: Guard | None = None,
    max_retries: int | None = None,
) -> AsyncIterator[Led]:
    async with asyncio.timeout(DEADLINE_S) if hasattr(asyncio, "timeout") else no_deadline():
        with ExitStack() as stack:
            scripts = (*contexts, *generations)
            servers = [stack.enter_context(ScriptedServer(completions)) for completions in scripts]
            kinds = ["context"] * len(contexts) + ["generation"] * len(generations)
            workers = [
                Worker(ServedInstance(i, kind, f"{kind}_servers", server.address, range(i, i + 1)))
                for i, (kind, server) in enumerate(zip(kinds, servers, strict=True))
            ]
            first, second = (
                Pool(kind, mine := [w for w in workers if w.kind == kind], router([*range(len(mine))]))
                for kind in ("context", "generation")
            )
            async with new_session() as session:
                assert await wait_ready(session, workers, 60.0, lambda text: None) == []
                service = LeaderService(
                    first, second, session, silence_s=silence_s, guard=guard, max_retries=max_retries
                )
                if services is not None:
                    services.append(service)
                bound = bind("127.0.0.1", free_port())
                runner, _ = await listen(service.app(), bound)
                try:
                    yield Led(
                        url(bound).removesuffix("/v1"), session, servers, [worker.name for worker in workers]
                    )
                finally:
                    await runner.cleanup()


@asynccontextmanager
async def no_deadline() -> AsyncIterator[None]:
    yield  # Python 3.10
