"""Protocols that pass a request from a context server to a generation server.

Sources: vLLM's `kv_transfer_params` (`nixl/pull_scheduler.py`, and the proxy of its NIXL test), by which the
generation server reads the KV cache, and computes the first token again; TensorRT-LLM's
`disaggregated_params` (`openai_disagg_service.py`), with which it goes on after the first token.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

CONTEXT_ONLY, GENERATION_ONLY = "context_only", "generation_only"
_NOT_WHOLE = ("length", "not_finished")  # TensorRT-LLM's reasons of an answer that goes on
_IDS = 1 << 42  # of requests, for each client; TensorRT-LLM's own are below


class DisaggProtocol(ABC):
    """What the two requests contain beside the client's request, and the answer between them."""

    name: str  # the key in requests and answers
    # A generation server that gets no KV cache computes the prompt again, without a word in its answer.
    may_recompute: bool

    @abstractmethod
    def for_context(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body for a context server; `request`: the whole request, not streamed."""

    @abstractmethod
    def handed(self, answer: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the part of a context server's answer for the other server; None: the answer is complete.

        Raises ValueError for an answer that has none, or several.
        """

    def for_generation(self, request: Mapping[str, Any], handed: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body for a generation server."""
        return {**request, self.name: handed}

    def _object(self, value: Any) -> dict[str, Any] | None:
        if value is None or isinstance(value, dict):
            return value
        raise ValueError(f"its {self.name} are no object")


class KvTransferParams(DisaggProtocol):
    """vLLM's."""

    name = "kv_transfer_params"
    may_recompute = True
    _FOR_CONTEXT = {"do_remote_decode": True, "do_remote_prefill": False} | dict.fromkeys(
        ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
    )

    def for_context(self, request: Mapping[str, Any]) -> dict[str, Any]:
        shortest = {"min_tokens": 1} if "min_tokens" in request else {}
        return {**request, **shortest, "max_tokens": 1, self.name: self._FOR_CONTEXT}

    def handed(self, answer: Mapping[str, Any]) -> dict[str, Any] | None:
        return self._object(answer.get(self.name))


class DisaggregatedParams(DisaggProtocol):
    """TensorRT-LLM's, and mpillm's."""

    name = "disaggregated_params"
    may_recompute = False

    def __init__(self, first_id: int) -> None:
        """`first_id`: of the requests; no other client of the servers has the same ids."""
        self._ids = itertools.count(first_id)

    def for_context(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return {**request, self.name: {"request_type": CONTEXT_ONLY, "disagg_request_id": next(self._ids)}}

    def handed(self, answer: Mapping[str, Any]) -> dict[str, Any] | None:
        choices = answer.get("choices")
        if not (isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict)):
            raise ValueError("its answer must have one choice")
        params = self._object(choices[0].get(self.name))
        if params is None or choices[0].get("finish_reason") not in _NOT_WHOLE:
            return None
        return params | {"request_type": GENERATION_ONLY}


def protocol_of(name: str, client: int) -> DisaggProtocol:
    """Return the protocol of that name, for one of the run's clients."""
    return KvTransferParams() if name == KvTransferParams.name else DisaggregatedParams((client + 1) * _IDS)
