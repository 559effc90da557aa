"""The kinds of servers by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpillm.core_names import NamedKinds, provided

if TYPE_CHECKING:  # each command reads this file for the names of options; few have any server
    from mpillm.programs.servers.kind import ServerKind

KINDS: NamedKinds[ServerKind] = NamedKinds(
    {
        "vllm": "mpillm.programs.servers.vllm:VLLM",
        "sglang": "mpillm.programs.servers.sglang:SGLANG",
        **provided("SERVERS"),
        "mpillm": "mpillm.programs.servers.mpillm_serve:MPILLM",
    },
    "mpillm.programs.servers.any_command:command_kind",
)
kind_of = KINDS.kind_of
