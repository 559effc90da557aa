"""How a context server hands a request over to a generation server: what each is asked, beside the request.

Sources: vLLM's `kv_transfer_params` (`nixl/pull_scheduler.py`, and the proxy of its NIXL test), which the
generation server reads the KV cache by, and computes the first token again; TensorRT-LLM's
`disaggregated_params` (`openai_disagg_service.py`), with which it goes on after the first token.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any, Protocol

_NOT_WHOLE = ("length", "not_finished")  # TensorRT-LLM's reasons of an answer that goes on
_IDS = 1 << 42  # of requests, for each client; TensorRT-LLM's own are below


class Handover(Protocol):
    """One way."""

    name: str  # what its answers hold
    # A generation server that gets no KV cache computes the prompt again, without a word in its answer.
    may_recompute: bool

    def for_context(self, request: bytes) -> bytes:
        """Return what a context server is asked; `request`: the JSON of the whole request, not streamed."""

    def handed(self, answer: bytes) -> dict[str, Any] | None:
        """Return what a context server's answer holds for the other one; None: there is nothing to generate.

        Raises ValueError if it can't be that.
        """

    def for_generation(self, request: bytes, handed: Mapping[str, Any]) -> bytes:
        """Return what a generation server is asked."""


class KvTransferParams:
    """vLLM's."""

    name = "kv_transfer_params"
    may_recompute = True
    _ASKED = {"do_remote_decode": True, "do_remote_prefill": False} | dict.fromkeys(
        ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
    )

    def for_context(self, request: bytes) -> bytes:
        asked = json.loads(request) | {"max_tokens": 1, self.name: self._ASKED}
        if "min_tokens" in asked:
            asked["min_tokens"] = 1
        return _written(asked)

    def handed(self, answer: bytes) -> dict[str, Any] | None:
        return _object(json.loads(answer).get(self.name), self.name)

    def for_generation(self, request: bytes, handed: Mapping[str, Any]) -> bytes:
        return _written(json.loads(request) | {self.name: handed})


class DisaggregatedParams:
    """TensorRT-LLM's, and mpillm's."""

    name = "disaggregated_params"
    may_recompute = False

    def __init__(self, client: int) -> None:
        """`client`: which of the run's; requests have ids of their own at all servers."""
        self._ids = itertools.count((client + 1) * _IDS)

    def for_context(self, request: bytes) -> bytes:
        params = {"request_type": "context_only", "disagg_request_id": next(self._ids)}
        return _written(json.loads(request) | {self.name: params})

    def handed(self, answer: bytes) -> dict[str, Any] | None:
        said = json.loads(answer)
        (choice,) = said["choices"]
        params = _object(choice.get(self.name), self.name)
        if params is None or choice.get("finish_reason") not in _NOT_WHOLE:
            return None
        return params | {"request_type": "generation_only"}

    def for_generation(self, request: bytes, handed: Mapping[str, Any]) -> bytes:
        return _written(json.loads(request) | {self.name: handed})


def handover_of(name: str, client: int) -> Handover:
    """Return the way of that name, for one of the run's clients."""
    return KvTransferParams() if name == KvTransferParams.name else DisaggregatedParams(client)


def _object(value: Any, name: str) -> dict[str, Any] | None:
    if value is None or isinstance(value, dict):
        return value
    raise ValueError(f"its {name} are no object")


def _written(request: Mapping[str, Any]) -> bytes:
    return json.dumps(request, separators=(",", ":")).encode()
