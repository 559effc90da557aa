"""The kinds of servers by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpillm.core_names import NamedKinds, brought

if TYPE_CHECKING:  # each command reads this file for the names of options; few have any server
    from mpillm.servers.kind import ServerKind

KINDS: NamedKinds[ServerKind] = NamedKinds(
    {
        "vllm": "mpillm.servers.vllm:VLLM",
        "sglang": "mpillm.servers.sglang:SGLANG",
        **brought("SERVERS"),
        "mpillm": "mpillm.servers.mpillm_serve:MPILLM",
    },
    "mpillm.servers.any_command:command_kind",
)
kind_of = KINDS.kind_of
