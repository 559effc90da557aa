"""``python -m tests.helpers.attackers LEADER CONTEXT GENERATION KV``: strangers and bad clients at these.

All at once, until it is killed: connections that say nothing, what is no HTTP, bodies that are not whole,
wide JSON, requests for a million tokens, KV caches that nobody fetches, forged places of them. It has the
lowest priority: what it makes servers do is to be measured, not what it does itself.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

HOST = "127.0.0.1"
PER_PORT = 200  # connections that are held
PAUSE_S = 0.5  # between two of an attack: what is held or promised counts here, not busy cores
BODY_BYTES = 12 << 20
_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
_PROMPT = {"prompt": [5, 6, 7], "max_tokens": 20, "ignore_eos": True}
_CONTEXT_ONLY = {"disaggregated_params": {"request_type": "context_only"}}
_FORGED = {
    "request_type": "generation_only",
    "first_gen_tokens": [1],
    "ctx_request_id": 1,
    "encoded_opaque_state": "eyJzZXJ2ZXIiOiAiYSIsICJob3N0IjogIjEwLjAuMC4xIn0=.",
}


def hold(port: int, data: bytes = b"", n: int = PER_PORT) -> None:
    """Hold connections; where one is closed, make another."""
    held: list[socket.socket] = []
    while True:
        with contextlib.suppress(OSError):
            one = socket.create_connection((HOST, port), 5.0)
            held.append(one)
            one.sendall(data)
        if len(held) > n:
            held.pop(0).close()
            time.sleep(PAUSE_S)


def shout(port: int) -> None:
    """Send what is no HTTP."""
    while True:
        with contextlib.suppress(OSError), socket.create_connection((HOST, port), 5.0) as one:
            one.sendall(b"\x1b[2J" + b"x" * 8000 + b"\r\n\r\n")
            one.recv(1 << 12)
        time.sleep(PAUSE_S)


def drip(port: int) -> None:
    """Send a large body slowly, and never all of it."""
    while True:
        with contextlib.suppress(OSError), socket.create_connection((HOST, port), 5.0) as one:
            one.sendall(_HEAD % BODY_BYTES)
            for _ in range(BODY_BYTES >> 16):
                one.sendall(b" " * (1 << 16))
                time.sleep(PAUSE_S)
        time.sleep(PAUSE_S)


def ask(port: int, body: object, pause_s: float = PAUSE_S) -> None:
    """Send a request again and again."""
    text = json.dumps(body)
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection(HOST, port, timeout=5.0)
            with contextlib.closing(connection):
                connection.request("POST", "/v1/completions", text)
                connection.getresponse().read()
        time.sleep(pause_s)


def attacks(leader: int, context: int, generation: int, kv: int) -> list[Callable[[], None]]:
    """Return what is done at once, each for ever."""
    ports = (leader, context, generation)
    made: list[Callable[[], None]] = [partial(hold, kv), partial(hold, kv, b"x" * 15)]
    for port in ports:
        made += [
            partial(hold, port),
            partial(hold, port, _HEAD % 9 + b"{"),
            partial(shout, port),
            *([partial(drip, port)] * 20),
            partial(ask, port, _PROMPT | {"max_tokens": 10**6, "n": 128}),
            partial(ask, port, _PROMPT | {"stop": ["x" * 1000] * 64}),
            partial(ask, port, _PROMPT | {"x": [[]] * 200_000}, 2.0),
        ]
    made += [
        partial(ask, context, _PROMPT | _CONTEXT_ONLY, 0.2),
        partial(ask, generation, _PROMPT | {"disaggregated_params": _FORGED}),
    ]
    return made


def main(ports: list[int]) -> None:
    os.nice(19)
    for attack in attacks(*ports):
        threading.Thread(target=attack, daemon=True).start()
    print("attacking", flush=True)
    sys.stdin.read()  # until whoever started it ends it, or itself


if __name__ == "__main__":
    main([*map(int, sys.argv[1:])])
