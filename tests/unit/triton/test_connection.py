"""A connection to a server that is not there."""

from __future__ import annotations

import pytest

from mpillm.triton.client.connection import AnswerError, Connection
from tests.helpers.support import free_ports


def test_a_server_that_is_not_there() -> None:
    (port,) = free_ports(1)
    with (
        Connection(f"localhost:{port}", 60.0) as connection,
        pytest.raises(AnswerError, match="failed to connect"),
    ):
        list(connection.ask("tensorrt_llm", {}))
