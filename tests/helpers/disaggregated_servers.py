"""Commands that serve disaggregated, and requests to them."""

from __future__ import annotations

import contextlib
import json
import re
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from tests.helpers.support import (
    Command,
    Starter,
    wait_until,
)

TIMEOUT_S = 120.0
MODEL = ("--model_path", "tiny-llama", "--max_seq_len", 512)
BODY: dict[str, Any] = {
    "prompt": [5, 6, 7],
    "max_tokens": 20,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}
CONTEXT: dict[str, Any] = {"disaggregated_params": {"request_type": "context_only"}}


def ask(port: int, path: str = "/v1/completions", **body: Any) -> tuple[int, Any]:
    """Return status and content of an answer; GET without a body."""
    connection = HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    with contextlib.closing(connection):
        connection.request("POST" if body else "GET", path, json.dumps(body) if body else None)
        response = connection.getresponse()
        text = response.read()
    return response.status, json.loads(text) if text.startswith(b"{") else text.decode()


def line_of(command: Command, pattern: str) -> re.Match[str]:
    """Wait until a command prints `pattern`; return the match."""
    wait_until(
        lambda: re.search(pattern, command.out) or command.process.poll() is not None, pattern, TIMEOUT_S
    )
    found = re.search(pattern, command.out)
    assert found, f"{command.end()!r}"
    return found


def write_yaml(folder: Path, leader: int, context: int, generation: int) -> None:
    """Write d.yaml, which names the ports of a leader and its two servers."""
    (folder / "d.yaml").write_text(
        f"port: {leader}\ncontext_servers: {{urls: ['localhost:{context}']}}\n"
        f"generation_servers: {{urls: ['localhost:{generation}']}}\n"
    )


def serve(starter: Starter, role: str, *options: object) -> Command:
    """Return a server of one rank."""
    words = ("serve", "--server_role", role, "--port", 0, "--log_dir", starter.folder / role)
    return starter.command([starter.python, "-m", "mpillm", *words, *MODEL, *options])


def port_of(command: Command) -> int:
    """Return the port of a server as soon as it is ready."""
    return int(line_of(command, r"serving .* at http://127.0.0.1:(\d+)/v1")[1])


def handed(answered: tuple[int, Any]) -> dict[str, Any]:
    """Return what a context server hands over, for a generation server."""
    status, content = answered
    assert status == 200, content
    params: dict[str, Any] = content["choices"][0]["disaggregated_params"]
    return params | {"request_type": "generation_only"}
