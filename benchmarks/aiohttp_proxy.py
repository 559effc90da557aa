"""``python -m benchmarks.aiohttp_proxy URL``: a reverse proxy as a person would write one, beside ours.

It prints its URL when it listens, and ends when its standard input does: with its parent.
"""

from __future__ import annotations

import asyncio
import sys

import aiohttp
from aiohttp import web

from launch.event_loop import new_loop


async def _serve(url: str) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def pass_on(request: web.Request) -> web.StreamResponse:
            kind = {"Content-Type": "application/json"}
            body = await request.read()
            async with session.request(
                request.method, url + request.path_qs, data=body, headers=kind
            ) as answer:
                made = web.StreamResponse(status=answer.status)
                made.content_type = answer.content_type
                await made.prepare(request)
                async for piece in answer.content.iter_any():
                    await made.write(piece)
                await made.write_eof()
                return made

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", pass_on)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
        await runner.cleanup()


if __name__ == "__main__":
    new_loop().run_until_complete(_serve(sys.argv[1]))
