"""Connections to all ports of the ranks."""

from __future__ import annotations

import socket

from launch.liveness_server import unreachable
from tests.helpers.descriptors import only_large_descriptors


def test_ports_are_reached_by_a_process_with_many_open_files() -> None:
    with only_large_descriptors(), socket.create_server(("127.0.0.1", 0)) as open_port:
        with socket.create_server(("127.0.0.1", 0)) as server:
            closed = server.getsockname()[1]
        targets = {0: ("127.0.0.1", open_port.getsockname()[1]), 1: ("127.0.0.1", closed)}
        assert unreachable(targets) == {1: "Connection refused"}
