"""`encoded_opaque_state`: the location of a request's KV cache, sent through the leader.

The generation server connects to the address in the state and sends a key there, so it must not trust
clients. The servers sign the state with a shared secret. Without a secret, they listen at the loopback
address, and accept only states with that address.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import hmac
import json
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpillm.endpoint.admission import is_loopback
from mpillm.endpoint.api_error import ApiError
from mpillm.endpoint.disagg.kv_socket import KEY_BYTES

_MAX_CHARS = 4096  # of a state
_NAME = "disaggregated_params.encoded_opaque_state"


@dataclass(frozen=True)
class KvState:
    """The location of a context's KV cache."""

    server: str  # name and URL, for messages
    host: str
    port: int
    key: str  # hexadecimal
    kv: str  # `KvFormat.layout`
    of: str  # `request_digest`


def request_digest(prompt: NDArray[np.int32], first_token: int) -> str:
    """Return a digest of a request: a KV cache belongs to one prompt and one first token."""
    return hashlib.sha256(np.append(prompt, np.int32(first_token)).tobytes()).hexdigest()


class Seal:
    """Writes states, and reads states that were written with the same secret."""

    def __init__(self, secret: str | None) -> None:
        self._secret = secret.encode() if secret else None

    def write(self, state: KvState) -> str:
        text = base64.b64encode(json.dumps(dataclasses.asdict(state)).encode()).decode()
        return f"{text}.{self._signature(text)}"

    def read(self, text: object) -> KvState:
        """Return the state in a request. Raises ApiError if no server with the same secret wrote it."""
        if not isinstance(text, str) or len(text) > _MAX_CHARS or not text.isascii():
            raise _wrong()
        payload, _, signature = text.partition(".")
        if not hmac.compare_digest(signature, self._signature(payload)):
            raise _wrong()
        try:
            state = KvState(**json.loads(base64.b64decode(payload, validate=True)))
            right = (
                all(isinstance(one, str) for one in (state.server, state.host, state.kv, state.of))
                and type(state.port) is int
                and 0 < state.port < 1 << 16
                and len(bytes.fromhex(state.key)) == KEY_BYTES
                and (self._secret is not None or is_loopback(state.host))
            )
        except (ValueError, TypeError, RecursionError, binascii.Error):
            right = False
        if not right:
            raise _wrong()
        return state

    def _signature(self, text: str) -> str:
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest() if self._secret else ""


def _wrong() -> ApiError:
    expected = "expected the value that a context server with the same MPILLM_KV_SECRET answered"
    return ApiError(400, f"{_NAME}: {expected}", _NAME)
