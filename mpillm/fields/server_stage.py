"""Servers that `run-llm-server` starts."""

from __future__ import annotations

from mpillm.configurator import Options, option
from mpillm.configurator.parsers import port
from mpillm.core_names import TRITON
from mpillm.fields.effects import used_by


class ServerFields(Options, group="server"):
    """Servers that `run-llm-server` starts."""

    server_host = option(
        "where started endpoints and tritonservers, which ask for no key, listen; 0.0.0.0: at all addresses",
        choices=("127.0.0.1", "0.0.0.0"),
        default="127.0.0.1",
    )
    server_port = option("port of a disaggregated leader", port, default=8000)
    worker_start_port = option(
        "port of the first disaggregated worker; the others take the ports after it", port, default=8001
    )
    tritonserver = option(
        "the tritonserver program [default: the one in PATH, or /opt/tritonserver/bin/tritonserver]",
        effect=used_by(*TRITON, measured=False),
    )
