"""Records of each server that a client used in a test, for `result.json`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpillm.cores.openai_client.endpoint import RemoteServer
from mpillm.cores.openai_client.server_reader import ServerReader
from mpillm.cores.openai_client.server_tally import COUNTED


def counts_of(endpoints: Sequence[RemoteServer]) -> dict[str, int]:
    """Return the sums of the counts that `ServerTally` keeps for each server."""
    return {name: sum(one.tally.counts[name] for one in endpoints) for name in COUNTED}


def server_records(
    servers: Sequence[RemoteServer],
    contexts: Sequence[RemoteServer],
    reader: ServerReader | None,
    *,
    owned: bool,
    may_recompute: bool,
) -> list[dict[str, Any]]:
    """Return a record for each server: its URL, role and model, this client's counts, and the server's own.

    `counted`: growth of the server's counts during the test (see `ServerCounts`), as only one client of the
    server reads it; {} if the server gives none. `reader`: None for the other clients. `may_recompute`: see
    `DisaggProtocol`.
    """
    role = "generation" if contexts else ""
    roles = [*((one, role) for one in servers), *((one, "context") for one in contexts)]
    read = reader.reads if reader is not None else ()
    return [
        {
            "url": one.url,
            "role": role,
            "model": one.model,
            "owned": owned,
            "may_recompute": may_recompute,
            **one.tally.values(),
            **({"counted": reader.by_server.get(one.url, {})} if reader and one.url in read else {}),
        }
        for one, role in roles
    ]
