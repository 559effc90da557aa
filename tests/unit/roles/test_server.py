"""The role of a rank that owns a server."""

from __future__ import annotations

import math
import socket
from pathlib import Path

import pytest

from disagg.errors import ConfigError
from mpillm.roles.server import ServerPlan, ServerRole
from mpillm.servers.kinds import kind_of


def test_a_host_without_an_address_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before there is a server whose log could tell."""

    def unknown(_: str) -> str:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    kind = kind_of("command:true {port}")
    plan = ServerPlan(3, 1, kind, "", {}, (), None, 0, None, math.inf, "0.0.0.0", "h7")
    with pytest.raises(ConfigError, match=r"server 3 \(command\): h7 has no address: .*not known"):
        ServerRole(plan, tmp_path, 1.0, lambda: None).load()
