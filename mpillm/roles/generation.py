"""The generation instance: receives KV caches, and generates from the second token on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mpillm.comms.messages import DONE, RESPONSE, SETTLE, Batch, Pairs, ResponseFlag
from mpillm.cores.base import LLMCore
from mpillm.cores.capabilities import TransfersKv
from mpillm.phases import Phase
from mpillm.roles.handoff import HandoffReceiver
from mpillm.roles.instance import InstanceRole
from mpillm.telemetry.recorder import Recorder, Spell

if TYPE_CHECKING:  # its import starts MPI
    from mpillm.comms.transport import Transport


class Generation(InstanceRole):
    """Receives its requests from context instances, never from the leader."""

    works_on = "decode"

    def __init__(
        self,
        core: LLMCore,
        route: Transport,
        leader: int,
        instance: int,
        senders: dict[int, int],
        warm_up_senders: int,
    ) -> None:
        """`senders`: for each rank the context instance that it leads.

        `warm_up_senders`: how many context instances will warm this one up.
        """
        super().__init__(core, route, leader, instance)
        assert isinstance(core, TransfersKv)
        self._moves: Spell | None = None  # whether KV caches are under way
        self._receiver = HandoffReceiver(route, core, senders)
        self._warm_up_senders = warm_up_senders
        self._warmed = 0
        self._lost: set[int] = set()  # context instances
        self._asked: dict[int, int] = {}  # requests the leader waits to hear of, and their lost instance
        SETTLE.handle(route, self._on_settle)

    def warmup(self) -> None:
        """Do nothing: the handoff brings the requests, perhaps even before this call."""

    def done(self, phase: Phase) -> bool:
        announced = self._receiver.announced
        if phase == "warmup":
            return len(announced) == self._warm_up_senders and self._warmed == sum(announced.values())
        return phase != "drain" or self._receiver.idle

    def record(self, recorder: Recorder) -> None:
        super().record(recorder)
        self._moves = recorder.spell(recorder.handoff)

    def poll(self) -> bool:
        if self._moves is not None:
            self._moves.see(self._receiver.n_moving > 0, time.perf_counter())
        moved = self._receiver.poll()
        self._owed = self._receiver.admitted - self._warmed - self._samples if self._in_test else 0
        worked = super().poll() or moved
        if self._asked:
            self._tell_settled()
        return worked

    def _on_drop(self, source: int, ids: list[int]) -> None:
        """Drop what a context instance has offered or handed over; the message comes from it or from the
        leader."""
        self._receiver.cancel(ids)
        self._tell_of(ids, ResponseFlag.CANCEL_DONE)

    def lost(self, instance: int) -> None:
        super().lost(instance)
        self._lost.add(instance)
        self._receiver.lost(instance)

    def _on_settle(self, source: int, asked: Pairs) -> None:
        self._asked |= {pair[0]: pair[1] for pair in asked}

    def _tell_settled(self) -> None:
        """Say which of the requests will be answered, and of which nothing is here any more."""
        # Until this rank knows of the loss, an offer may still come.
        settled = [i for i, lost in self._asked.items() if lost in self._lost and i not in self._receiver]
        if not settled:
            return
        rows = np.zeros(len(settled), RESPONSE)
        rows["id"], rows["n_tokens"] = settled, 1
        running = self._receiver.running
        rows["flags"] = [
            ResponseFlag.CONTEXT_DONE if id_ in running else ResponseFlag.LOST for id_ in settled
        ]
        lost = np.array([self._asked.pop(id_) for id_ in settled], np.int32)
        DONE.send(self._route, self._leader, Batch(rows, lost))

    def _on_responses(self, responses: Batch) -> None:
        final = (responses.rows["flags"] & ResponseFlag.FINAL) != 0
        self._receiver.running.difference_update(responses.rows["id"][final].tolist())
        self._warmed += 0 if self._in_test else len(responses)
        super()._on_responses(responses)

    def _own_tokens(self, rows: NDArray[np.void], final: NDArray[np.bool_]) -> int:
        """Return their number without the first tokens, which the context instances generated."""
        return int((np.maximum(rows["n_tokens"], 1) - 1)[final].sum())
