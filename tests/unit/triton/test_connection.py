"""A connection to a server that is not there."""

from __future__ import annotations

import pytest

from mpillm.triton.client.connection import GrpcConnection, InferError
from tests.helpers.support import free_ports


def test_a_server_that_is_not_there() -> None:
    (port,) = free_ports(1)
    with (
        GrpcConnection(f"localhost:{port}", 60.0) as connection,
        pytest.raises(InferError, match="failed to connect"),
    ):
        list(connection.infer("tensorrt_llm", {}))
