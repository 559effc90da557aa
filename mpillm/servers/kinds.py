"""The kinds of servers by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpillm.configurator.named_kinds import NamedKinds

if TYPE_CHECKING:  # each command reads this file for the names of options; few have any server
    from mpillm.servers.kind import ServerKind

_KINDS: NamedKinds[ServerKind] = NamedKinds(
    "mpillm.servers",
    {
        "vllm": "vllm:VLLM",
        "sglang": "sglang:SGLANG",
        "trtllm-serve": "trtllm_serve:TRTLLM_SERVE",
        "tritonserver": "tritonserver:TRITONSERVER",
        "mpillm": "mpillm_serve:MPILLM",
    },
)
kind_of = _KINDS.kind_of
server = _KINDS.parser()
"""Reads --server."""
