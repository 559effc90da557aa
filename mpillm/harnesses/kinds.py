"""The kinds of other clients by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpillm.core_names import NamedKinds

if TYPE_CHECKING:  # each command reads this file for the names of options; few start any client
    from mpillm.harnesses.kind import HarnessKind

KINDS: NamedKinds[HarnessKind] = NamedKinds(
    {
        "inference-endpoint": "mpillm.harnesses.inference_endpoint:INFERENCE_ENDPOINT",
        "aiperf": "mpillm.harnesses.aiperf:AIPERF",
        "guidellm": "mpillm.harnesses.guidellm:GUIDELLM",
        "vllm-bench": "mpillm.harnesses.vllm_bench:VLLM_BENCH",
    },
    "mpillm.harnesses.any_command:command_kind",
)
kind_of = KINDS.kind_of
