"""Servers that `run-llm-server` starts."""

from __future__ import annotations

from mpillm.configurator import Field
from mpillm.fields.parsers import port

server_port = Field("server_port", "where a disaggregated leader listens", port, default=8000, group="server")
worker_start_port = Field(
    "worker_start_port", "where the first disaggregated worker listens; the others count on from there", port, default=8001, group="server"
)
tritonserver = Field(
    "tritonserver", "the tritonserver program [default: the one in PATH, or /opt/tritonserver/bin/tritonserver]", group="server"
)
