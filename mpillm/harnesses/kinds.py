"""The kinds of other clients by name."""

from __future__ import annotations

import importlib
import shlex
from typing import TYPE_CHECKING

from disagg.errors import nearest
from mpillm.configurator.parsers import expects

if TYPE_CHECKING:  # each command reads this file for the names of options; few start any client
    from mpillm.harnesses.kind import HarnessKind

PREFIX = "command:"
_BUILT_IN = {
    "inference-endpoint": "inference_endpoint:INFERENCE_ENDPOINT",
    "aiperf": "aiperf:AIPERF",
    "guidellm": "guidellm:GUIDELLM",
    "vllm-bench": "vllm_bench:VLLM_BENCH",
}


def kind_of(text: str) -> HarnessKind:
    """Return the kind that --harness names. Raises ValueError if there is none."""
    if text.startswith(PREFIX):
        from mpillm.harnesses.any_command import command_kind

        return command_kind(shlex.split(text.removeprefix(PREFIX)))
    if text not in _BUILT_IN:
        raise ValueError(nearest(text, _BUILT_IN).strip(" ()") or "no such client")
    module, _, name = _BUILT_IN[text].partition(":")
    kind: HarnessKind = getattr(importlib.import_module(f"mpillm.harnesses.{module}"), name)
    return kind


@expects(f"{', '.join(_BUILT_IN)}, or {PREFIX}WORDS")
def harness(text: str) -> str:
    """Read --harness."""
    if text.lower() in _BUILT_IN:
        return text.lower()
    try:
        kind_of(text)
    except ValueError as error:
        from mpillm.configurator import Reason

        raise Reason(str(error)) from None
    return text
