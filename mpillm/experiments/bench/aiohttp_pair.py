"""``python -m mpillm.experiments.bench.aiohttp_pair QPS REQUESTS TOKENS_IN TOKENS_OUT``: baseline over HTTP.

An aiohttp client sends requests at a Poisson rate to an aiohttp server in another process, which computes
nothing. It prints p50 and p99 of the time to an answer, in milliseconds.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time

import aiohttp
import numpy as np
from aiohttp import web

from launch.event_loop import run_alone

_CONNECTIONS = 4096
_END_S = 10.0


async def _serve() -> None:
    """Answer until standard input ends."""

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        return web.json_response({"tokens": [sum(body["prompt"]) % 32000] * body["max_tokens"]})

    app = web.Application()
    app.router.add_post("/", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
    await runner.cleanup()


async def _measure(port: int, qps: float, n: int, n_input: int, n_output: int) -> list[float]:
    """Return the latencies of `n` requests, in seconds."""
    random = np.random.default_rng(1)
    due = np.cumsum(random.exponential(1 / qps, n))
    body = {"prompt": random.integers(0, 32000, n_input).tolist(), "max_tokens": n_output}
    url, latencies = f"http://127.0.0.1:{port}/", []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=_CONNECTIONS)) as session:

        async def send() -> None:
            sent = time.perf_counter()
            async with session.post(url, data=json.dumps(body)) as answer:
                tokens = (await answer.json())["tokens"]
            if len(tokens) != n_output:
                raise ValueError(f"{len(tokens)} tokens, not {n_output}")
            latencies.append(time.perf_counter() - sent)

        await send()
        latencies.clear()
        start, sending = time.perf_counter(), []
        for at in due.tolist():
            if (wait := start + at - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            sending.append(asyncio.ensure_future(send()))
        await asyncio.gather(*sending)
    return latencies


def main(qps: int, n: int, n_input: int, n_output: int) -> None:
    """Start the server, measure it, and stop it."""
    command = [sys.executable, "-m", "mpillm.experiments.bench.aiohttp_pair"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None and server.stdout is not None
        latencies = run_alone(_measure(int(server.stdout.readline()), qps, n, n_input, n_output))
        server.stdin.close()
        server.wait(_END_S)
    print(*(1000 * np.percentile(latencies, [50, 99])))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(*map(int, sys.argv[1:]))
    else:
        run_alone(_serve())
