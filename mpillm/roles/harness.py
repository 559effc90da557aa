"""The harness: LoadGen's samples become requests, and answers become LoadGen's responses."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mpillm.comms.messages import (
    ANSWER,
    NO_INSTANCE,
    QUERY,
    REQUEST,
    WINDOW,
    Batch,
    RequestFlag,
    ResponseFlag,
)
from mpillm.comms.transport import Transport
from mpillm.cores.histogram import Histogram
from mpillm.data.dataset import Dataset
from mpillm.errors import Failure, RunError
from mpillm.loadgen.sut import LoadGenTest, Query, sample_responses
from mpillm.phases import Phase
from mpillm.roles.role import Role

# Plain numbers: NumPy takes three times as long for an operation on flags.
_IGNORE_STOP = int(RequestFlag.IGNORE_STOP)
_FIRST, _FINAL, _ERROR = int(ResponseFlag.FIRST), int(ResponseFlag.FINAL), int(ResponseFlag.ERROR)
_CONTEXT_DONE, _LOST = int(ResponseFlag.CONTEXT_DONE), int(ResponseFlag.LOST)
_MAX_BATCH = 1024  # requests per message
_NO_MEMORY = (
    "out of memory: it lists all queries before the test; lower --min_query_count, --min_duration"
    " or the expected rate (--offline_expected_qps, --server_target_qps)"
)


@dataclass(frozen=True)
class Sampling:
    """How to generate every answer of a run."""

    max_output_len: int
    min_output_len: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


@dataclass
class LossCosts:
    """What the loss of an instance cost."""

    retried: int = 0  # samples
    waited_s: float = 0.0  # from issue to the loss, summed over them: computed in vain, or queued
    recovered: float = 0.0  # time.perf_counter() when the last of them so far was answered


@dataclass
class Totals:
    """Counts of a test, updated as answers arrive; constant size."""

    issued: int = 0
    samples: int = 0
    errors: int = 0
    tokens: int = 0
    started: float = 0.0  # time.perf_counter(); 0: not started
    ended: float = 0.0
    ttft: Histogram = field(default_factory=Histogram)
    tpot: Histogram = field(default_factory=Histogram)
    latency: Histogram = field(default_factory=Histogram)  # from issue to the whole answer
    losses: dict[int, LossCosts] = field(default_factory=dict)  # by instance that was lost with open requests

    @property
    def in_flight(self) -> int:
        """Samples that LoadGen waits for."""
        return self.issued - self.samples


class Log(Protocol):
    """Takes answers as they come: see `mpillm.report.request_log.RequestLog`."""

    def add(
        self,
        issued: NDArray[np.float64],
        first: NDArray[np.float64],
        ended: float,
        index: NDArray[np.int64],
        tokens: NDArray[np.int64],
        error: NDArray[np.bool_],
    ) -> None:
        """Take answers that came at `ended`; times are seconds of the test."""


class Harness(Role):
    """Owns LoadGen and the data set. The number of a sample's slot is its request's id on the wire."""

    def __init__(
        self,
        route: Transport,
        leader: int,
        dataset: Dataset,
        sampling: Sampling,
        test: LoadGenTest,
        on_answer: Callable[[int, NDArray[np.int32]], None] | None,
        hands_over: bool,
        totals: Totals,
        log: Log | None = None,
    ) -> None:
        """`leader`: its rank.

        `hands_over`: context instances hand requests to generation instances. `on_answer(index in the data
        set, tokens)`, if given, is called for each answer. The harness counts in `totals`, and tells `log`,
        if given, of every answer.
        """
        self._route = route
        self._leader = leader
        self._dataset = dataset
        self._sampling = sampling
        self._test = test
        self._on_answer = on_answer
        self._holders = 2 if hands_over else 1
        self._window = 0
        self._pending: deque[Query] = deque()
        self._totals = totals
        self._log = log
        # By slot.
        self._retried: dict[int, LossCosts] = {}  # those under way that were sent again
        self._free = np.zeros(0, np.uint32)
        self._active = np.zeros(0, np.bool_)  # the sample is not answered yet
        self._held = np.zeros(0, np.int64)  # instances that may still send something of the request
        self._sample_ids = np.zeros(0, np.uint64)
        self._indices = np.zeros(0, np.int64)
        self._issued_at = np.zeros(0)
        self._first_at = np.zeros(0)
        ANSWER.handle(route, self._on_answers)
        WINDOW.handle(route, self._on_window)

    def test(self) -> None:
        self._totals.started = time.perf_counter()
        self._test.start()

    def done(self, phase: Phase) -> bool:
        if phase == "ready":
            return self._window > 0
        if phase != "test":
            return True
        if (error := self._test.error) is not None:
            raise RunError(Failure(f"LoadGen: {_NO_MEMORY if isinstance(error, MemoryError) else error}"))
        return self._test.finished

    def poll(self) -> bool:
        issued = self._test.issued
        while issued:
            query = issued.popleft()
            self._totals.issued += len(query.ids)
            self._pending.append(query)
        worked = False
        while self._pending and self._window > 0:
            self._send_next()
            worked = True
        return worked

    # --- requests ---

    def _send_next(self) -> None:
        query = self._pending[0]
        n = min(len(query.ids), self._window, _MAX_BATCH)
        ids, indices = query.ids[:n], query.indices[:n]
        if n == len(query.ids):
            self._pending.popleft()
        else:
            self._pending[0] = Query(query.ids[n:], query.indices[n:], query.issued)
        slots = self._take_slots(n)
        self._sample_ids[slots] = ids
        self._indices[slots] = indices
        self._issued_at[slots] = query.issued
        self._send(slots)

    def _send(self, slots: NDArray[np.uint32]) -> None:
        """Send the requests of these slots, of new samples or once again."""
        n, indices = len(slots), self._indices[slots]
        self._active[slots] = True
        self._held[slots] = self._holders
        lengths, tokens = self._dataset.gather(indices)
        rows = np.zeros(n, REQUEST)
        rows["id"] = slots
        rows["n_tokens"] = lengths
        rows["max_output"] = self._sampling.max_output_len
        if self._dataset.output_lengths is not None:
            rows["max_output"] = np.minimum(
                self._dataset.output_lengths[indices], self._sampling.max_output_len
            )
        rows["min_output"] = np.minimum(self._sampling.min_output_len, rows["max_output"])
        rows["temperature"] = self._sampling.temperature
        rows["top_k"] = self._sampling.top_k
        rows["top_p"] = self._sampling.top_p
        rows["seed"] = (indices + (self._sampling.seed * 1_000_003 & 0xFFFFFFFF)) & 0xFFFFFFFF
        rows["generation"] = NO_INSTANCE
        if self._dataset.ignores_stop is not None:
            rows["flags"] = self._dataset.ignores_stop[indices] * np.uint32(_IGNORE_STOP)
        self._window -= n
        QUERY.send(self._route, self._leader, Batch(rows, tokens))

    def _take_slots(self, n: int) -> NDArray[np.uint32]:
        if n > len(self._free):
            size = len(self._active)
            grown = max(n, size, 1024)
            self._free = np.concatenate(
                [self._free, np.arange(size + grown - 1, size - 1, -1, dtype=np.int64).astype(np.uint32)]
            )
            for name in ("_active", "_held", "_sample_ids", "_indices", "_issued_at", "_first_at"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros(grown, old.dtype)]))
        slots, self._free = self._free[-n:].copy(), self._free[:-n]
        self._first_at[slots] = 0
        return slots

    def _send_again(self, slots: NDArray[np.uint32], instance: int, now: float) -> None:
        """Ask once more for the answers that `instance`, which is lost, owed. LoadGen does not notice."""
        loss = self._totals.losses.setdefault(instance, LossCosts())
        loss.retried += len(slots)
        loss.waited_s += float((now - self._issued_at[slots]).sum())
        self._retried.update(dict.fromkeys(slots.tolist(), loss))
        for start in range(0, len(slots), _MAX_BATCH):
            self._send(slots[start : start + _MAX_BATCH])

    # --- answers ---

    def _on_window(self, source: int, requests: int) -> None:
        self._window += requests

    def _on_answers(self, source: int, batch: Batch) -> None:
        now = time.perf_counter()
        ids, flags = batch.rows["id"], batch.rows["flags"]
        if flags[0] & _LOST:
            self._send_again(ids, int(batch.tokens[0]), now)
            return
        lengths = batch.rows["n_tokens"].astype(np.int64)
        starts = lengths.cumsum() - lengths
        any_flag = int(np.bitwise_or.reduce(flags))
        final = (flags & _FINAL) != 0
        # FINAL from the generation instance may overtake FIRST from the context instance: then it brings the
        # first token, too. FIRST before FINAL, because one message may hold both of an answer.
        for flag in _FIRST, _FINAL:
            if not any_flag & flag:
                continue
            kind = final if flag == _FINAL else (flags & _FIRST) != 0
            first = kind & self._active[ids] & (self._first_at[ids] == 0) & (lengths > 0)
            if first.any():
                self._on_first(ids[first], batch.tokens, starts[first], now)
        if any_flag & _FINAL:
            errors = (flags[final] & _ERROR) != 0
            self._on_final(ids[final], batch.tokens, starts[final], lengths[final], errors, now)
        if any_flag & (_FINAL | _CONTEXT_DONE):
            self._let_go(ids, flags, final)

    def _on_first(
        self, slots: NDArray[np.uint32], tokens: NDArray[np.int32], starts: NDArray[np.int64], now: float
    ) -> None:
        self._first_at[slots] = now
        self._totals.ttft.add(now - self._issued_at[slots])
        if self._test.use_token_latencies:
            self._test.first_tokens(
                sample_responses(self._sample_ids[slots], tokens, starts, np.ones(len(slots), np.int64))
            )

    def _on_final(
        self,
        slots: NDArray[np.uint32],
        tokens: NDArray[np.int32],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        errors: NDArray[np.bool_],
        now: float,
    ) -> None:
        if not self._active[slots].all() or (len(slots) > 1 and len(np.unique(slots)) != len(slots)):
            raise RunError(Failure("a sample was answered twice"))
        self._active[slots] = False
        several = (lengths > 1) & (self._first_at[slots] > 0)
        self._totals.tpot.add((now - self._first_at[slots[several]]) / (lengths[several] - 1))
        totals = self._totals
        totals.latency.add(now - self._issued_at[slots])
        if self._retried:
            for slot in slots.tolist():
                if (loss := self._retried.pop(slot, None)) is not None:
                    loss.recovered = now
        totals.samples += len(slots)
        totals.errors += int(errors.sum())
        totals.tokens += int(lengths.sum())
        totals.ended = now
        if self._log is not None:
            began, first = totals.started, self._first_at[slots]
            first[first == 0] = np.nan
            self._log.add(
                self._issued_at[slots] - began,
                first - began,
                now - began,
                self._indices[slots],
                lengths,
                errors,
            )
        if self._on_answer is not None:
            for index, start, length in zip(
                self._indices[slots].tolist(), starts.tolist(), lengths.tolist(), strict=True
            ):
                self._on_answer(index, tokens[start : start + length])
        self._test.complete(sample_responses(self._sample_ids[slots], tokens, starts, lengths))

    def _let_go(self, slots: NDArray[np.uint32], flags: NDArray[np.uint32], final: NDArray[np.bool_]) -> None:
        """Free the slots of which no instance will send anything again.

        A request that was handed over ends twice, in either order: FINAL from one instance, CONTEXT_DONE from
        the other.
        """
        if self._holders == 1:
            freed = slots[final]
        else:
            ended = final | ((flags & _CONTEXT_DONE) != 0)
            # The answer ended with its first token: nothing was handed over.
            alone = final & ((flags & _FIRST) != 0)
            self._held[slots] -= np.where(alone, self._holders, ended.astype(np.int64))
            freed = slots[ended & (self._held[slots] == 0)]
        if len(freed):
            self._free = np.concatenate([self._free, freed])
