"""The command serve, and requests to it."""

from __future__ import annotations

import json
import re
from http.client import HTTPConnection
from typing import Any

from tests.helpers.support import Command, Starter, wait_until

TIMEOUT_S = 240.0


def serve(starter: Starter, ranks: int, *options: object) -> tuple[Command, str, int]:
    """Return a server that is ready, its host and its port."""
    log_dir = starter.folder / "run"
    line = [
        starter.python,
        "-m",
        "mpillm",
        "mpirun",
        "-n",
        ranks,
        "serve",
        "--port",
        0,
        "--log_dir",
        log_dir,
        *options,
    ]
    command = starter.command(line, log_dir)
    return (command, *ready_at(command))


def ready_at(command: Command) -> tuple[str, int]:
    """Return the host and the port of a server, once it is ready."""
    ready = r"serving .* at http://([^:]+):(\d+)/v1"
    wait_until(
        lambda: re.search(ready, command.out) or command.process.poll() is not None, "the URL", TIMEOUT_S
    )
    found = re.search(ready, command.out)
    assert found, f"{command.end()!r}"
    return found[1], int(found[2])


def post(host: str, port: int, path: str, **body: Any) -> HTTPConnection:
    """Return a connection whose answer is to be read."""
    connection = HTTPConnection(host, port, timeout=TIMEOUT_S)
    connection.request("POST", path, json.dumps(body))
    return connection


def answer(host: str, port: int, path: str, **body: Any) -> dict[str, Any]:
    connection = post(host, port, path, **body)
    response = connection.getresponse()
    made: dict[str, Any] = json.loads(response.read())
    assert response.status == 200, made
    connection.close()
    return made


def tokens_of(stream: bytes) -> list[int]:
    """Return the tokens of a stream that is whole."""
    *chunks, done, end = stream.decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [
        token
        for chunk in chunks
        for token in json.loads(chunk.removeprefix("data: "))["choices"][0]["token_ids"]
    ]


def metric(host: str, port: int, name: str) -> float:
    connection = HTTPConnection(host, port, timeout=TIMEOUT_S)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return sum(
        float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"mpillm:{name}{{")
    )
