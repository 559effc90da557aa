"""Servers of other people that a run starts, owns and ends."""

from __future__ import annotations

from mpillm.configurator import Options, option
from mpillm.configurator.effect import ANY
from mpillm.configurator.parsers import positive, rate, shell_words
from mpillm.core_names import TRITON, TRTLLM_ENDPOINT
from mpillm.fields.effects import used_by
from mpillm.servers.kinds import server as server_kind


class OwnServerFields(
    Options, group="own servers", effect=used_by(*TRTLLM_ENDPOINT, *TRITON, needs=("server", ANY))
):
    """Servers of other people that a run starts, owns and ends."""

    server = option(
        "start the servers that the ranks are clients of, and end them with the run: vllm, sglang,"
        " trtllm-serve, tritonserver, mpillm, or command:WORDS with {port} in them, and {model}, {name},"
        " {host}, {tp}, {pp} or {devices}; --core_type follows",
        server_kind,
        effect=used_by(*TRTLLM_ENDPOINT, *TRITON),
    )
    server_args = option(
        "more options of each server's command line, as they are typed there", shell_words, default=()
    )
    server_memory_limit = option(
        "GiB of host memory that the processes of a server may hold together; more is its failure", rate
    )
    clients_per_server = option(
        "ranks that are clients of each server; the first of them owns it", positive, default=1
    )
