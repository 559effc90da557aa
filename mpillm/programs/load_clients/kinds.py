"""The kinds of other clients by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpillm.core_names import NamedKinds

if TYPE_CHECKING:  # each command reads this file for the names of options; few start any client
    from mpillm.programs.load_clients.kind import LoadClientKind

KINDS: NamedKinds[LoadClientKind] = NamedKinds(
    {
        "inference-endpoint": "mpillm.programs.load_clients.inference_endpoint:INFERENCE_ENDPOINT",
        "aiperf": "mpillm.programs.load_clients.aiperf:AIPERF",
        "guidellm": "mpillm.programs.load_clients.guidellm:GUIDELLM",
        "vllm-bench": "mpillm.programs.load_clients.vllm_bench:VLLM_BENCH",
    },
    "mpillm.programs.load_clients.any_command:command_kind",
)
kind_of = KINDS.kind_of

CONVERSATIONS = "conversations"
"""The name of mpillm's own load of conversations, in the place of a client's."""
