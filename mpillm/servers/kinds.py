"""The kinds of servers by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpillm.configurator.named_kinds import NamedKinds
from mpillm.core_names import brought

if TYPE_CHECKING:  # each command reads this file for the names of options; few have any server
    from mpillm.servers.kind import ServerKind

_KINDS: NamedKinds[ServerKind] = NamedKinds(
    {
        "vllm": "mpillm.servers.vllm:VLLM",
        "sglang": "mpillm.servers.sglang:SGLANG",
        **brought("SERVERS"),
        "mpillm": "mpillm.servers.mpillm_serve:MPILLM",
    },
    "mpillm.servers.any_command:command_kind",
)
kind_of = _KINDS.kind_of
server = _KINDS.parser()
"""Reads --server."""
