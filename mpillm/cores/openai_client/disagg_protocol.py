"""Protocols that pass a request from a context server to a generation server.

With vLLM's `kv_transfer_params` (`nixl/pull_scheduler.py`, and the proxy of its NIXL test), the generation
server reads the KV cache, and computes the first token again. With TensorRT-LLM's `disaggregated_params`
(`openai_disagg_service.py`), the generation server continues after the first token.

SGLang's servers need each request simultaneously, with equal bootstrap fields: see
`disaggregation/prefill.py` and `decode.py`, and its router `mini_lb.py`. There, the generation server waits
for the KV cache and the first token. It cannot compute a prompt: a request without a KV cache fails.
"""

from __future__ import annotations

import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

CONTEXT_ONLY, GENERATION_ONLY = "context_only", "generation_only"
_INCOMPLETE = ("length", "not_finished")  # TensorRT-LLM's finish reasons of an answer that continues
_IDS = 1 << 42  # request ids of each client; TensorRT-LLM's own ids are smaller
_ID_BITS = 63  # of SGLang's routers


class DisaggProtocol(ABC):
    """The additional fields of the requests to both servers."""

    name: str  # the key in requests and answers
    # A generation server that gets no KV cache computes the prompt again, and does not report it.
    may_recompute: bool
    alone: Mapping[str, Any] = MappingProxyType({})
    """Fields of a request to only one of the servers, which transfers nothing."""

    @abstractmethod
    def for_generation(self, request: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body for a generation server; `params`: what it needs to get the KV cache."""


class SequentialProtocol(DisaggProtocol):
    """Has the context server's answer name the KV cache, before the request goes to a generation server."""

    @abstractmethod
    def for_context(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body for a context server; `request`: the complete request, not streamed."""

    @abstractmethod
    def handoff_params(self, answer: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the fields of a context server's answer for the generation server; None: it is complete.

        Raises ValueError for an invalid answer.
        """

    def for_generation(self, request: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
        return {**request, self.name: params}

    def _object(self, value: Any) -> dict[str, Any] | None:
        if value is None or isinstance(value, dict):
            return value
        raise ValueError(f"its {self.name} are not an object")


class KvTransferParams(SequentialProtocol):
    """vLLM's protocol."""

    name = "kv_transfer_params"
    may_recompute = True
    _FOR_CONTEXT = {"do_remote_decode": True, "do_remote_prefill": False} | dict.fromkeys(
        ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
    )

    def for_context(self, request: Mapping[str, Any]) -> dict[str, Any]:
        shortest = {"min_tokens": 1} if "min_tokens" in request else {}
        return {**request, **shortest, "max_tokens": 1, self.name: self._FOR_CONTEXT}

    def handoff_params(self, answer: Mapping[str, Any]) -> dict[str, Any] | None:
        return self._object(answer.get(self.name))


class DisaggregatedParams(SequentialProtocol):
    """TensorRT-LLM's and mpillm's protocol."""

    name = "disaggregated_params"
    may_recompute = False

    def __init__(self, first_id: int) -> None:
        """`first_id`: of this client's requests. Other clients of the servers use other ids."""
        self._ids = itertools.count(first_id)

    def for_context(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return {**request, self.name: {"request_type": CONTEXT_ONLY, "disagg_request_id": next(self._ids)}}

    def handoff_params(self, answer: Mapping[str, Any]) -> dict[str, Any] | None:
        choices = answer.get("choices")
        if not (isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict)):
            raise ValueError("its answer must have one choice")
        params = self._object(choices[0].get(self.name))
        if params is None or choices[0].get("finish_reason") not in _INCOMPLETE:
            return None
        return params | {"request_type": GENERATION_ONLY}


class BootstrapProtocol(DisaggProtocol):
    """SGLang's protocol: both servers get the same request simultaneously."""

    name = "bootstrap_room"
    may_recompute = False
    alone = MappingProxyType({"bootstrap_host": "2.2.2.2", name: 0})  # as in its own warm-up

    def params(self, host: str, port: int) -> dict[str, Any]:
        """Return the fields of the requests to a context server at `host` and to a generation server.

        `bootstrap_room` is a random id, by which servers with data parallelism also choose the rank. `port`:
        see `readiness.bootstrap_port_of`.
        """
        address = f"[{host}]" if ":" in host else host
        return {"bootstrap_host": address, "bootstrap_port": port, self.name: random.getrandbits(_ID_BITS)}

    def for_generation(self, request: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
        return {**request, **params}


def protocol_of(name: str, client: int) -> SequentialProtocol | BootstrapProtocol:
    """Return the protocol of that name, for one of the run's clients."""
    if name == BootstrapProtocol.name:
        return BootstrapProtocol()
    return KvTransferParams() if name == KvTransferParams.name else DisaggregatedParams((client + 1) * _IDS)
