"""Strangers at the ports of real servers, over loopback: an honest client is served, the run ends well."""

from __future__ import annotations

import base64
import contextlib
import json
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.helpers import disaggregated_servers as disaggregated
from tests.helpers.make_folder import make_folder
from tests.helpers.ports import free_ports
from tests.helpers.serve_command import answer, serve
from tests.helpers.support import DONE, Starter

FILES = 300
HELD_S = 2.0  # longer than rank 0 goes without looking at the other ranks' processes
HALF = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"


def with_few_files(starter: Starter) -> Starter:
    """Return a starter whose processes may open few files."""
    python = Path(starter.folder / "python")
    python.write_text(f'#!/bin/sh\nulimit -n {FILES}\nexec {starter.python} "$@"\n')
    python.chmod(0o755)
    starter.python = str(python)
    return starter


@contextlib.contextmanager
def strangers(host: str, port: int, n: int, data: bytes = b"") -> Iterator[None]:
    """Hold `n` connections that have sent only `data`."""
    with contextlib.ExitStack() as stack:
        for _ in range(n):
            with contextlib.suppress(OSError):  # closed at once
                one = stack.enter_context(socket.create_connection((host, port), 10.0))
                one.sendall(data)
        yield


@pytest.mark.parametrize("data", [b"", HALF])
def test_strangers_take_no_file_from_the_run(one: Starter, data: bytes) -> None:
    """They hold more connections than the server may open files."""
    command, host, port = serve(with_few_files(one), 3, "--core_type", "dummy")
    with strangers(host, port, FILES + 20, data):
        time.sleep(HELD_S)
        assert answer(host, port, "/v1/completions", prompt=[1, 2], max_tokens=2)["usage"]
        command.process.send_signal(signal.SIGTERM)
        ended = command.end().must(DONE)
    assert ended.result["status"] == "SERVED"


@contextlib.contextmanager
def attacked(*ports: int) -> Iterator[None]:
    """Attack a leader, its servers and a KV port with all that strangers and bad clients can do."""
    words = [sys.executable, "-m", "tests.helpers.attackers", *map(str, ports)]
    attackers = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    try:
        assert attackers.stdout is not None and attackers.stdout.readline() == "attacking\n"
        time.sleep(HELD_S)
        yield
        assert attackers.poll() is None
    finally:
        attackers.kill()
        attackers.communicate()


def first_token_s(port: int) -> float:
    """Return the seconds to the first token of a streamed answer, which must be whole."""
    began = time.monotonic()
    connection = HTTPConnection("127.0.0.1", port, timeout=120.0)
    with contextlib.closing(connection):
        connection.request(
            "POST", "/v1/completions", json.dumps({**disaggregated.BODY, "max_tokens": 3, "stream": True})
        )
        response = connection.getresponse()
        assert response.readline().startswith(b"data: ")
        took_s = time.monotonic() - began
        assert response.status == 200 and response.read().endswith(b"data: [DONE]\n\n")
    return took_s


@pytest.mark.slow
def test_an_honest_client_under_all_attacks_at_once(one: Starter) -> None:
    """Its first token comes within 3 times its quiet time, and the servers end with their results."""
    make_folder(one.folder)
    leader_port, context_port, generation_port = free_ports(3)
    disaggregated.write_yaml(one.folder, leader_port, context_port, generation_port)
    few = with_few_files(one)
    roles = {"context": context_port, "generation": generation_port}
    servers = {
        role: few.command(
            [
                *(few.python, "-m", "mpillm", "serve", "--server_role", role, "--port", port),
                *("--log_dir", one.folder / role, *disaggregated.MODEL),
            ],
            one.folder / role,
        )
        for role, port in roles.items()
    }
    for server in servers.values():
        disaggregated.port_of(server)
    leader = few.command(
        [few.python, "-m", "mpillm", "serve", "--server_role", "leader", "--disagg_config", "d.yaml"]
    )
    disaggregated.line_of(leader, r"leading 2 servers at http")
    params = disaggregated.handed(
        disaggregated.ask(context_port, **disaggregated.BODY, **disaggregated.CONTEXT)
    )
    state = json.loads(base64.b64decode(params["encoded_opaque_state"].partition(".")[0]))
    quiet, under_attack = [], []
    for _ in range(4):  # in turns: others use this machine, too
        quiet += [first_token_s(leader_port) for _ in range(8)]
        with attacked(leader_port, context_port, generation_port, state["port"]):
            under_attack += [first_token_s(leader_port) for _ in range(8)]
    for server in (leader, *servers.values()):
        server.process.send_signal(signal.SIGTERM)
    for role, server in servers.items():
        assert server.end().must(DONE).result["status"] == "SERVED", role
        logs = sum(path.stat().st_size for path in (one.folder / role).rglob("*.log"))
        assert logs < 200_000, f"{role}: {logs} bytes of logs"
    leader.end().must(DONE)
    assert statistics.median(under_attack) <= 3 * statistics.median(quiet), (quiet, under_attack)
