"""Cores that are no part of mpillm: run by name, as ``--core_type plugin_cores:Class`` with this folder in
PYTHONPATH.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np

from launch.siblings import runs
from mpillm.comms.messages import RESPONSE, Batch, ResponseFlag
from mpillm.cores.base import CoreConfig, Credits, LLMCore
from mpillm.cores.dummy import DummyCore


class Echo(LLMCore):
    """Answers a prompt with its last tokens, backwards; one request at each poll."""

    def __init__(self, config: CoreConfig, comms: object = None) -> None:
        super().__init__(config, None)
        self._waiting: list[Batch] = []
        self._loaded = False

    def load(self) -> None:
        self._loaded = True

    def run_health_check(self) -> None:
        assert self._loaded

    def credits(self) -> Credits:
        return Credits(5, 1 << 30)

    def enqueue(self, requests: Batch) -> None:
        offsets = requests.offsets()
        self._waiting += [
            Batch(requests.rows[i : i + 1], requests.tokens[offsets[i] : offsets[i + 1]])
            for i in range(len(requests))
        ]
        assert len(self._waiting) <= 5, "more than it granted"

    def has_work(self) -> bool:
        return bool(self._waiting)

    def poll_responses(self) -> Batch | None:
        request = self._waiting.pop(0)
        tokens = request.tokens[::-1][: request.rows["max_output"][0]].astype(np.int32)
        rows = np.array(
            [(request.rows["id"][0], len(tokens), ResponseFlag.FIRST | ResponseFlag.FINAL)], RESPONSE
        )
        return Batch(rows, tokens)


class Whole(DummyCore):
    """Reports no first tokens before the ends of answers."""

    def __init__(self, config: CoreConfig, comms: object = None) -> None:
        super().__init__(config, None)
        self.streams = False


class Loading(DummyCore):
    """Leaves a file named by its rank when its `load` has begun."""

    def load(self) -> None:
        Path(f"loading_{self.config.rank}").touch()
        super().load()


class Counting(DummyCore):
    """Leaves the number of its answers in a file named by its rank, now and then."""

    _answered = 0

    def poll_responses(self) -> Batch | None:
        responses = super().poll_responses()
        if responses is not None:
            before, self._answered = (
                self._answered,
                self._answered + int(((responses.rows["flags"] & ResponseFlag.FINAL) != 0).sum()),
            )
            if before // 2000 != self._answered // 2000:
                draft = Path(f"answered_{self.config.rank}.part")
                draft.write_text(str(self._answered))
                draft.replace(draft.stem)
        return responses


class Compiling(DummyCore):
    """Compiles two kernels in the test, on each of its ranks."""

    def compiled_in_test(self) -> list[str]:
        return [f"kernel {i} of instance {self.config.instance}" for i in range(2)]


class SlowContext(DummyCore):
    """Computes for a while at each look if it is a context core. Generation costs nothing."""

    def has_work(self) -> bool:
        if self.config.role == "context":
            time.sleep(0.005)
        return super().has_work()


class Orphaned(DummyCore):
    """Kills one of its ranks in the test; the other instances fail as soon as it is gone."""

    _LOST = Path("lost")  # the process id

    def start_test(self) -> None:
        super().start_test()
        if self.config.rank == int(os.environ["MPILLM_TEST_RANK"]):
            draft = self._LOST.with_suffix(".part")
            draft.write_text(str(os.getpid()))
            draft.replace(self._LOST)
            self._dies_at = time.monotonic() + 0.3

    def has_work(self) -> bool:
        if hasattr(self, "_dies_at"):
            if time.monotonic() > self._dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
        elif self._warm and self._LOST.exists() and not runs(int(self._LOST.read_text())):
            raise ValueError("the other is gone")
        return super().has_work()


class Faulty(DummyCore):
    """Fails where the dummy core can't, as MPILLM_TEST_FAULT=WHERE:HOW:RANK says.

    In ``told``, once the file `fail` is in the working directory.
    """

    def _at(self, where: str) -> None:
        place, how, rank = os.environ["MPILLM_TEST_FAULT"].split(":")
        if place == where and int(rank) == self.config.rank:
            if how == "hang":
                time.sleep(3600)
            raise ValueError(f"broken in {where}")

    def start_test(self) -> None:
        super().start_test()
        self._at("ready")

    def has_work(self) -> bool:
        if self._warm and Path("fail").exists():
            self._at("told")
        return super().has_work()

    def flush(self) -> None:
        self._at("drain")

    def notify_stop(self) -> None:
        self._at("stop")

    def send_kv(self, request_id: int, receiver: int, slot: int) -> None:
        if self._warm:
            self._at("handoff")
        super().send_kv(request_id, receiver, slot)

    def poll_responses(self) -> Batch | None:
        responses = super().poll_responses()
        if self._warm and responses is not None:
            self._at("answer")
            if os.environ["MPILLM_TEST_FAULT"] == f"twice:raise:{self.config.rank}":
                self._instant.append(Batch(self._last.rows, self._last.tokens))
        return responses

    def enqueue(self, requests: Batch) -> None:
        self._last = requests
        super().enqueue(requests)
