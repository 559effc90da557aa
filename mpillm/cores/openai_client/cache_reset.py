"""Before a test: empty the prefix cache of a server, by the routes of vLLM, mpillm and SGLang."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence

from mpillm.cores.openai_client.answer import failure_text
from mpillm.cores.openai_client.endpoint import EndpointError, RemoteServer
from mpillm.cores.openai_client.http_connection import HttpError

PATHS = ("/reset_prefix_cache", "/flush_cache")
"""Routes of vLLM and mpillm, and of SGLang."""
MAX_RESET_S = 20.0
"""The longest time for all servers of a client, a part of --ready_deadline."""

_PAUSE_S = 0.25  # servers refuse while they release the blocks of ended requests
_NO_SUCH_PATH = (404, 405)
_REMEDY = (
    "start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment and mpillm serve with --reset_prefix_cache;"
    " other servers may have no such route: leave out --reset_prefix_cache"
)


async def reset_prefix_caches(servers: Sequence[RemoteServer]) -> None:
    """Empty the prefix caches of idle servers, simultaneously. Raises EndpointError for the first failure."""
    await asyncio.gather(*map(reset_prefix_cache, servers))


async def reset_prefix_cache(server: RemoteServer, limit_s: float = MAX_RESET_S) -> None:
    """Empty the prefix cache of an idle server.

    Raises EndpointError if the server has no route for it, or has not emptied its cache within `limit_s`.
    """
    end = time.monotonic() + limit_s
    missing: list[str] = []
    for path in PATHS:
        while True:
            problem, is_missing = await _try(server, path, max(0.0, end - time.monotonic()))
            if not problem:
                return
            if is_missing:
                missing.append(problem)
                break
            if time.monotonic() + 2 * _PAUSE_S > end:  # the next request would have no time for its answer
                failure = f"did not empty its prefix cache within {limit_s:g} s (--reset_prefix_cache)"
                raise EndpointError(f"{server.url} {failure}: {problem}")
            await asyncio.sleep(_PAUSE_S)
    lack = "has no route to empty its prefix cache (--reset_prefix_cache)"
    raise EndpointError(f"{server.url} {lack}: {'; '.join(missing)}; {_REMEDY}")


async def _try(server: RemoteServer, path: str, limit_s: float) -> tuple[str, bool]:
    """Return why a route did not empty the cache ("": it did), and whether the server lacks the route."""
    try:
        status, headers, reply = await server.fetch("POST", path, limit_s)
    except HttpError as error:
        return f"POST {path}: {error}", False
    if status != 200:
        text = f"POST {path}: {failure_text(status, reply, headers.get('location'))}"
        return text, status in _NO_SUCH_PATH
    return ("", False) if _is_success(reply) else (f"POST {path}: it answers success: false", False)


def _is_success(reply: bytes) -> bool:
    """Return whether a body does not deny success: vLLM may answer 200 with ``{"success": false}``."""
    try:
        answer = json.loads(reply)
    except (ValueError, RecursionError):
        return True  # empty, or a text
    return not (isinstance(answer, dict) and answer.get("success") is False)
