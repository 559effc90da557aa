"""Orders to the ranks of an instance to send or receive the KV cache of a sequence."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Kind(enum.IntEnum):
    RECEIVE = 0
    SEND = 1  # a cache that earlier steps completed
    SEND_LAYERS = 2  # a cache that the step with this order completes


@dataclass(frozen=True)
class Transfer:
    """The transfer of one KV cache, as an order to all ranks of an instance."""

    kind: Kind
    ticket: int  # unique in its instance: ranks report it as done
    peer: int  # index of the other instance
    slot: int  # at the receiver
    n_tokens: int
    blocks: list[int]
    window_blocks: list[int] = field(default_factory=list)  # of layers with a window, at a receiver
