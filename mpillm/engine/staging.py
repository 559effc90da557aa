"""Copy between host and device without waiting."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[Any] | list[int], device: torch.device) -> Tensor:
    """Return a copy on `device` (lists become int64), complete for all work that starts there later."""
    tensor = torch.from_numpy(np.asarray(array))
    # From pinned memory the host need not wait; PyTorch keeps that memory until the copy is done.
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class Sampled:
    """Tokens of a step that the device may not have computed yet: int64 [n]."""

    def __init__(self, tokens: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._tokens = tokens
        if tokens.device.type != "cpu":
            self._tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True).copy_(
                tokens, non_blocking=True
            )
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
