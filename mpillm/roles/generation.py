"""Role of a generation instance: receive KV caches, and generate from the second token on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mpillm.comms.messages import DONE, RESPONSE, SETTLE, Batch, NumberRows, ResponseFlag
from mpillm.cores.base import LLMCore
from mpillm.cores.capabilities import TransfersKv
from mpillm.phases import Phase
from mpillm.roles.handoff import HandoffReceiver
from mpillm.roles.instance import InstanceRole
from mpillm.telemetry.recorder import Recorder, SpanTracker

if TYPE_CHECKING:  # at run time, this import would start MPI
    from mpillm.comms.transport import Transport


class GenerationRole(InstanceRole):
    """Role of a generation instance's root rank, which receives requests from context instances."""

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
        """`senders`: index of each context instance, by its root rank.

        `warm_up_senders`: number of context instances that warm this generation instance up.
        """
        super().__init__(core, route, leader, instance)
        assert isinstance(core, TransfersKv)
        self._transfers: SpanTracker | None = None  # tracks when KV caches are in transfer
        self._receiver = HandoffReceiver(route, core, senders)
        self._warm_up_senders = warm_up_senders
        self._warmed = 0
        self._short_turns: set[int] = set()  # ids of requests whose prompts this instance computes
        self._n_short_turns = 0  # since the test began
        self._lost: set[int] = set()  # lost context instances
        self._inquiries: dict[int, int] = {}  # lost context instance by request id, until SETTLE is answered
        SETTLE.handle(route, self._on_settle)

    def warmup(self) -> None:
        """Do nothing: the warm-up requests arrive by handoff, maybe before this call."""

    def done(self, phase: Phase) -> bool:
        announced = self._receiver.announced
        if phase == "warmup":
            return len(announced) == self._warm_up_senders and self._warmed == sum(announced.values())
        return phase != "drain" or self._receiver.idle

    def record(self, recorder: Recorder) -> None:
        super().record(recorder)
        self._transfers = recorder.track(recorder.handoff)

    def poll(self) -> bool:
        if self._transfers is not None:
            self._transfers.update(self._receiver.n_transfers > 0, time.perf_counter())
        moved = self._receiver.poll()
        n_received = self._receiver.admitted - self._warmed + self._n_short_turns
        self._n_outstanding = n_received - self._samples if self._in_test else 0
        worked = super().poll() or moved
        if self._inquiries:
            self._answer_inquiries()
        return worked

    def report(self) -> dict[str, Any]:
        return {**super().report(), "prompts_computed_here": self._n_short_turns}

    def _enqueue(self, requests: Batch) -> None:
        ids = requests.rows["id"].tolist()
        self._short_turns.update(ids)
        self._n_short_turns += len(ids)
        super()._enqueue(requests)

    def _on_drop(self, source: int, ids: list[int]) -> None:
        """Drop offered or handed-off requests. A context instance or the leader sends DROP."""
        self._receiver.cancel(ids)
        self._send_flag(ids, ResponseFlag.CANCEL_DONE)

    def lost(self, instance: int) -> None:
        super().lost(instance)
        self._lost.add(instance)
        self._receiver.lost(instance)

    def _on_settle(self, source: int, requests: NumberRows) -> None:
        self._inquiries |= {pair[0]: pair[1] for pair in requests}

    def _answer_inquiries(self) -> None:
        """Answer SETTLE: CONTEXT_DONE for requests that this instance will complete, LOST for the others."""
        # Wait until this rank has received LOST: before, the lost instance's offers may still arrive.
        settled = [i for i, lost in self._inquiries.items() if lost in self._lost and i not in self._receiver]
        if not settled:
            return
        rows = np.zeros(len(settled), RESPONSE)
        rows["id"], rows["n_tokens"] = settled, 1
        running = self._receiver.running
        rows["flags"] = [
            ResponseFlag.CONTEXT_DONE if id_ in running else ResponseFlag.LOST for id_ in settled
        ]
        lost = np.array([self._inquiries.pop(id_) for id_ in settled], np.int32)
        DONE.send(self._route, self._leader, Batch(rows, lost))

    def _on_responses(self, responses: Batch) -> None:
        final = responses.rows["id"][(responses.rows["flags"] & ResponseFlag.FINAL) != 0].tolist()
        self._receiver.running.difference_update(final)
        if self._short_turns:
            self._end_short_turns(responses.rows)
        self._warmed += 0 if self._in_test else len(responses)
        super()._on_responses(self._with_prompt_counts(responses, final))

    def _end_short_turns(self, rows: NDArray[np.void]) -> None:
        """Mark final rows after which no context instance sends another row."""
        for i in np.flatnonzero(rows["flags"] & ResponseFlag.FINAL).tolist():
            if (id_ := int(rows["id"][i])) in self._short_turns:
                self._short_turns.remove(id_)
                rows["flags"][i] |= ResponseFlag.FIRST

    def _with_prompt_counts(self, responses: Batch, final: list[int]) -> Batch:
        """Add the prompt counts of responses that end, before these."""
        known = self._receiver.prompt_counts
        counts = {id_: known.pop(id_) for id_ in final if id_ in known} if known else {}
        if not counts:
            return responses
        rows = np.array([(id_, 2, ResponseFlag.PROMPT_COUNTS) for id_ in counts], RESPONSE)
        numbers = np.array([*counts.values()], np.int32).reshape(-1)
        return Batch(np.concatenate([rows, responses.rows]), np.concatenate([numbers, responses.tokens]))

    def _own_tokens(self, rows: NDArray[np.void], final: NDArray[np.bool_]) -> int:
        """Return the number of generated tokens, without first tokens that context instances generate."""
        tokens = rows["n_tokens"].astype(np.int64)
        is_alone = (rows["flags"] & ResponseFlag.FIRST) != 0
        return int(np.where(is_alone, tokens, np.maximum(tokens, 1) - 1)[final].sum())
