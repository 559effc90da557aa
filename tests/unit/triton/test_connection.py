"""A connection to a server that is not there."""

from __future__ import annotations

import pytest

from mpillm.triton.client.connection import GrpcConnection, InferError
from tests.helpers.ports import free_port


def test_a_server_that_is_not_there() -> None:
    port = free_port()
    with (
        GrpcConnection(f"localhost:{port}", 60.0) as connection,
        pytest.raises(InferError, match="failed to connect"),
    ):
        list(connection.infer("tensorrt_llm", {}))
