"""Torch cores that fail, or take too much: run by name, as ``--core_type plugin_torch_cores:Class`` with this folder in PYTHONPATH."""

from __future__ import annotations

import os

from mpillm.cores.base import Credits
from mpillm.cores.torch_core import TorchCore
from mpillm.messages import Batch


class Failing(TorchCore):
    """Raises at its fifth step of the test, on rank MPILLM_TEST_RANK."""

    _left = 1 << 60

    def start_test(self) -> None:
        super().start_test()
        if self.config.rank == int(os.environ["MPILLM_TEST_RANK"]):
            self._left = 5

    def poll_responses(self) -> Batch | None:
        self._left -= 1
        if not self._left:
            raise ValueError("broken in a step")
        return super().poll_responses()


class Greedy(TorchCore):
    """Takes all requests at once, whatever its KV cache holds: which of them run is the scheduler's affair alone."""

    def credits(self) -> Credits:
        return Credits(1 << 20, 1 << 40)
