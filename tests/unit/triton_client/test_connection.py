"""A connection to a server that is not there."""

from __future__ import annotations

import pytest

from mpillm.triton_client.connection import AnswerError, Connection
from tests.helpers.support import free_ports, wait_until


def test_a_stream_that_has_ended_before_a_request() -> None:
    """The message is the same whether the refusal comes before or after the request, which is a race."""
    (port,) = free_ports(1)
    with Connection(f"localhost:{port}", 60.0) as connection:
        wait_until(lambda: not connection._responses.empty(), "the stream to end")
        with pytest.raises(AnswerError, match="failed to connect"):
            list(connection.ask("tensorrt_llm", {}))
