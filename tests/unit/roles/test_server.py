"""The role of a rank that owns a server."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from disagg.errors import ConfigError
from launch.command import Command, find_program
from launch.interfaces import own_addresses
from launch.owned_server import OwnedServer
from mpillm.programs.servers.kind import ServerNode, ServerSpec
from mpillm.programs.servers.kinds import kind_of
from mpillm.roles.server import ServerRole, doing, last_message
from tests.helpers.support import wait_until

SPEC = ServerSpec(kind_of("command:true {port}"), "", {}, index=3, rank=1, host="0.0.0.0", reached_at="h7")


def test_a_host_without_an_address_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before there is a server whose log could tell."""

    def unknown(_: str) -> str:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    with pytest.raises(ConfigError, match=r"server 3 \(command\): h7 has no address: .*not known"):
        ServerRole(SPEC, tmp_path, 1.0, lambda: None, print).load()


def test_a_host_that_is_named_to_itself_as_loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other parts of its server need an address of its that they reach."""
    monkeypatch.setenv("PATH", "")
    made = ServerRole(
        replace(SPEC, kind=kind_of("vllm"), node=ServerNode(1, 2, "h6", 4711), reached_at="127.0.1.1"),
        tmp_path,
        1.0,
        lambda: None,
        print,
    )
    with pytest.raises(ConfigError, match="there is no vllm"):
        made.load()
    assert made._spec.address == next(iter(own_addresses()), "127.0.1.1")


@pytest.mark.parametrize("set_by_user", [False, True])
def test_halves_share_a_secret_that_is_not_logged(
    set_by_user: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if set_by_user:
        monkeypatch.setenv("KV_SECRET", "theirs")
    kind = replace(kind_of("command:sh -c 'printenv KV_SECRET' {port}"), secret="KV_SECRET")
    made = ServerRole(
        replace(SPEC, kind=kind, role="context", reached_at="127.0.0.1"),
        tmp_path,
        5.0,
        lambda: None,
        print,
        "ours",
    )
    made.load()
    try:
        log = tmp_path / "server_3.log"
        wait_until(lambda: log.read_text().count("\n") > 1, "the server's secret", 5)
    finally:
        made.stop()
    command_line, secret_of_server = log.read_text().splitlines()
    assert command_line.startswith("$ ") and "ours" not in command_line
    assert secret_of_server == ("theirs" if set_by_user else "ours")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["$ vllm serve DIR"], ""),
        (["(APIServer pid=7) INFO 11-27 08:24:02 [api_server.py:12] Up"], "Up"),
        (['I1127 08:23:54.417167 9615 python_be.cc:2249] "TRITONBACKEND_Init"'], '"TRITONBACKEND_Init"'),
        (["Loading", "+----+----+", "| Model | Status |", "+----+----+", ""], "| Model | Status |"),
        (["Loading shards:  50%|#####     | 1/2"], "Loading shards:  50%|#####     | 1/2"),
        (["a" * 61], "a" * 59 + "…"),
    ],
)
def test_the_last_message_of_a_server(lines: list[str], message: str) -> None:
    assert last_message("\n".join(f"  | {line}" for line in lines)) == message


def test_the_cpu_time_of_a_silent_server_is_reported(tmp_path: Path) -> None:
    """Its CPU time distinguishes a server that imports for a minute from one that hangs."""
    server = OwnedServer(Command((sys.executable, "-c", "while True: pass")), tmp_path / "log")
    try:
        wait_until(lambda: server.cpu_s >= 0.5, "its CPU time")
        assert re.fullmatch(r"server 0 \(x\): starts, \d+ s of CPU so far", doing("server 0 (x)", "", server))
        os.utime(server.log)  # that CPU time may have taken more than 10 s
        assert doing("server 0 (x)", "Loads", server) == "server 0 (x): Loads"
        os.utime(server.log, (time.time() - 30,) * 2)
        assert re.fullmatch(r"server 0 \(x\), silent \d+ s: Loads", doing("server 0 (x)", "Loads", server))
    finally:
        server.stop(0.0)


def test_which_program_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a shell would: `transformers` beside this Python, a library's, took the place of the server's."""
    for folder in ("beside", "path"):
        (tmp_path / folder).mkdir()
        (program := tmp_path / folder / "it").write_text("#!/bin/sh\n")
        program.chmod(0o755)
    python = str(tmp_path / "beside" / "python")
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert find_program("it", "", typed=True, python=python) == str(tmp_path / "path" / "it")
    assert find_program("it", "", python=python) == str(tmp_path / "beside" / "it"), "mpirun, say"
    monkeypatch.setenv("PATH", "")
    assert find_program("it", "", typed=True, python=python) == str(tmp_path / "beside" / "it")
