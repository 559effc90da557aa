"""The kinds of servers by name."""

from __future__ import annotations

import importlib
import shlex
from typing import TYPE_CHECKING

from disagg.errors import nearest
from mpillm.configurator.parsers import expects

if TYPE_CHECKING:  # each command reads this file for the names of options; few have any server
    from mpillm.servers.kind import ServerKind

PREFIX = "command:"
_BUILT_IN = {
    "vllm": "vllm:VLLM",
    "sglang": "sglang:SGLANG",
    "trtllm-serve": "trtllm_serve:TRTLLM_SERVE",
    "tritonserver": "tritonserver:TRITONSERVER",
    "mpillm": "mpillm_serve:MPILLM",
}


def kind_of(text: str) -> ServerKind:
    """Return the kind that --server names. Raises ValueError if there is none."""
    if text.startswith(PREFIX):
        from mpillm.servers.any_command import command_kind

        return command_kind(shlex.split(text.removeprefix(PREFIX)))
    if text not in _BUILT_IN:
        raise ValueError(nearest(text, _BUILT_IN).strip(" ()") or "no such kind")
    module, _, name = _BUILT_IN[text].partition(":")
    kind: ServerKind = getattr(importlib.import_module(f"mpillm.servers.{module}"), name)
    return kind


@expects(f"{', '.join(_BUILT_IN)}, or {PREFIX}WORDS")
def server(text: str) -> str:
    """Read --server."""
    if text.lower() in _BUILT_IN:
        return text.lower()
    try:
        kind_of(text)
    except ValueError as error:
        from mpillm.configurator import Reason

        raise Reason(str(error)) from None
    return text
