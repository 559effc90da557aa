"""Torch cores that fail, or take too much: run as ``--core_type plugin_torch_cores:Class`` with this folder
in PYTHONPATH.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Container
from pathlib import Path
from typing import Any

from mpillm.comms.messages import Batch
from mpillm.comms.mover import Mover, Peer, TransferHandle
from mpillm.cores.base import Credits
from mpillm.cores.torch_core import TorchCore
from mpillm.engine.shape.checkpoint_folder import stored_name
from mpillm.engine.weights import sources


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


class FailingHandoff(TorchCore):
    """Raises at the fifth piece of a KV cache that rank MPILLM_TEST_RANK would move in the test."""

    min_split_bytes = 0
    _left = 1 << 60

    def start_test(self) -> None:
        super().start_test()
        if self.config.rank == int(os.environ["MPILLM_TEST_RANK"]):
            self._left = 5

    def connect(self, mover: Mover, peers: dict[int, Peer]) -> None:
        self._mover = mover
        super().connect(self, peers)

    def send(self, rank: int, tag: int, buffer: Any) -> TransferHandle:
        self._count()
        return self._mover.send(rank, tag, buffer)

    def poll(self) -> None:
        self._mover.poll()

    def receive(self, rank: int, tag: int, buffer: Any) -> TransferHandle:
        self._count()
        return self._mover.receive(rank, tag, buffer)

    def _count(self) -> None:
        self._left -= 1
        if not self._left:
            raise ValueError("broken in the handoff")


class Greedy(TorchCore):
    """Takes all requests at once, whatever its KV cache holds, so that only the scheduler decides which
    run."""

    def credits(self) -> Credits:
        return Credits(1 << 20, 1 << 40)


class Silent(TorchCore):
    """Does not tell its steps: None stands for a method that a class lacks."""

    record_steps = None  # type: ignore[assignment]


class BadStorage(TorchCore):
    """Loses the file MPILLM_TEST_FILE while it reads its tensor model.norm.weight: "truncate" or "hang", as
    MPILLM_TEST_FAULT says."""

    def load(self) -> None:
        def stored_name_of(name: str, names: Container[str]) -> str:
            if name == "model.norm.weight":
                if os.environ["MPILLM_TEST_FAULT"] == "truncate":
                    os.truncate(Path(os.environ["MPILLM_TEST_FILE"]), 4096)
                else:
                    ctypes.PyDLL(None).sleep(600)  # as in a page fault, no other thread gets the interpreter
            return stored_name(name, names)

        vars(sources)["stored_name"] = stored_name_of
        super().load()
