"""Copy between host and device without waiting."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MIN_SIZE = 1024  # numbers


class StreamEvent(Protocol):
    """A position in a CUDA stream."""

    def query(self) -> bool:
        """Return whether all earlier work in the stream is done."""
        ...


def to_device(array: NDArray[Any] | list[int], device: torch.device) -> Tensor:
    """Return a copy on `device` (lists become int64), complete for all work that starts on it later."""
    tensor = torch.from_numpy(np.asarray(array))
    # The host need not wait for a copy from pinned memory. PyTorch keeps that memory until the copy is done.
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def last_of_each(places: NDArray[np.int64], nowhere: int) -> NDArray[np.int64]:
    """Replace each place that equals the next one by `nowhere`, since a device writes in any order."""
    return np.where(np.append(places[:-1] == places[1:], False), nowhere, places)


class Staging:
    """Buffers for copying small arrays (int64) to a GPU, reused once the GPU has read them.

    Allocating memory for each array, like `to_device`, takes longer than the copy.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._filled: list[_Buffer] = []  # since the last `read_until`
        self._in_use: deque[tuple[StreamEvent, list[_Buffer]]] = deque()
        self._free: list[_Buffer] = []

    def to_device(self, array: NDArray[np.int64]) -> Tensor:
        """Return a copy that the current stream makes, for work launched before the next `read_until`."""
        while self._in_use and self._in_use[0][0].query():
            self._free += self._in_use.popleft()[1]
        n = len(array)
        at = next((i for i, buffer in enumerate(self._free) if len(buffer.numbers) >= n), None)
        buffer = self._new(n) if at is None else self._free.pop(at)
        buffer.numbers[:n] = array
        self._filled.append(buffer)
        return buffer.on_device[:n].copy_(buffer.host[:n], non_blocking=True)

    def read_until(self, event: StreamEvent) -> None:
        """Allow reuse of the buffers filled so far once `event` has completed."""
        self._in_use.append((event, self._filled))
        self._filled = []

    def _new(self, n: int) -> _Buffer:
        size = max(_MIN_SIZE, 1 << (n - 1).bit_length())
        host = torch.empty(size, dtype=torch.int64, pin_memory=self._device.type != "cpu")
        return _Buffer(host, host.numpy(), torch.empty(size, dtype=torch.int64, device=self._device))


class _Buffer(NamedTuple):
    host: Tensor
    numbers: NDArray[np.int64]  # the same memory
    on_device: Tensor


class SampledTokens:
    """Tokens of a step that the device may not have computed yet: int64 [n]."""

    def __init__(self, tokens: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._tokens = tokens
        if tokens.device.type != "cpu":
            host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._tokens = host.copy_(tokens, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def ready(self) -> bool:
        """Return whether `take` returns without waiting."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def take(self) -> list[int]:
        """Wait for the tokens and return them."""
        if self._event is not None:
            self._event.synchronize()
        tokens: list[int] = self._tokens.tolist()
        return tokens
