"""The kinds of other clients by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpillm.configurator.named_kinds import NamedKinds

if TYPE_CHECKING:  # each command reads this file for the names of options; few start any client
    from mpillm.harnesses.kind import HarnessKind

_KINDS: NamedKinds[HarnessKind] = NamedKinds(
    "mpillm.harnesses",
    {
        "inference-endpoint": "inference_endpoint:INFERENCE_ENDPOINT",
        "aiperf": "aiperf:AIPERF",
        "guidellm": "guidellm:GUIDELLM",
        "vllm-bench": "vllm_bench:VLLM_BENCH",
    },
)
kind_of = _KINDS.kind_of
harness = _KINDS.parser()
"""Reads --harness."""
