"""The harness: LoadGen's samples become requests, and answers become LoadGen's responses."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpillm.comms.tags import Tag
from mpillm.comms.transport import Received, Transport
from mpillm.dataset import Dataset
from mpillm.errors import Failure, RunError
from mpillm.loadgen.sut import LoadGenTest, Query, sample_responses
from mpillm.messages import NO_INSTANCE, REQUEST, Batch, ResponseFlag
from mpillm.report.histogram import Histogram
from mpillm.roles.base import Role

_MAX_BATCH = 1024  # requests of one message
_NO_MEMORY = (
    "its queries do not fit the memory: it lists them all beforehand, as many as --min_query_count says, or the expected rate"
    " (--offline_expected_qps, --server_target_qps) in --min_duration"
)


@dataclass(frozen=True)
class Sampling:
    """How every answer of a run is generated."""

    max_output_len: int
    min_output_len: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


@dataclass
class Totals:
    """Counted as answers come; constant size."""

    issued: int = 0
    samples: int = 0
    errors: int = 0
    tokens: int = 0
    started: float = 0.0
    ended: float = 0.0


class Harness(Role):
    """Owns LoadGen and the data set. A sample in flight has a slot, whose number is the request's id on the wire."""

    def __init__(
        self,
        route: Transport,
        leader: int,
        dataset: Dataset,
        sampling: Sampling,
        make_test: Callable[[], LoadGenTest],
        on_answer: Callable[[int, NDArray[np.int32]], None] | None,
        hands_over: bool,
    ) -> None:
        """`leader`: its rank in the route communicator; `hands_over`: context instances hand requests to generation instances.

        `on_answer(index in the data set, tokens)` is called for each answer, if given.
        """
        self._route = route
        self._leader = leader
        self._dataset = dataset
        self._sampling = sampling
        self._make_test = make_test
        self._on_answer = on_answer
        self._holders = 2 if hands_over else 1
        self._test: LoadGenTest | None = None
        self._window = 0
        self._pending: deque[Query] = deque()
        self.totals = Totals()
        self.ttft = Histogram()
        self.tpot = Histogram()
        # By slot.
        self._free = np.zeros(0, np.uint32)
        self._active = np.zeros(0, np.bool_)  # the sample is not answered yet
        self._held = np.zeros(0, np.int64)  # instances that may still speak of the request: its slot is not free before
        self._sample_ids = np.zeros(0, np.uint64)
        self._indices = np.zeros(0, np.int64)
        self._issued_at = np.zeros(0)
        self._first_at = np.zeros(0)
        route.handlers[Tag.ANSWER] = self._on_answers
        route.handlers[Tag.WINDOW] = self._on_window

    def ready(self) -> None:
        self._test = self._make_test()

    def test(self) -> None:
        assert self._test is not None
        self.totals.started = time.perf_counter()
        self._test.start()

    def done(self, phase: str) -> bool:
        if phase == "ready":
            return self._window > 0
        if phase != "test" or self._test is None:
            return True
        if (error := self._test.error) is not None:
            raise RunError(Failure(f"LoadGen: {_NO_MEMORY if isinstance(error, MemoryError) else error}"))
        return self._test.finished

    @property
    def in_flight(self) -> int:
        """Samples that LoadGen waits for."""
        return self.totals.issued - self.totals.samples

    def poll(self) -> bool:
        if self._test is None:
            return False
        issued = self._test.issued
        while issued:
            query = issued.popleft()
            self.totals.issued += len(query.ids)
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
        lengths, tokens = self._dataset.gather(indices)
        rows = np.zeros(n, REQUEST)
        rows["id"] = slots
        rows["n_tokens"] = lengths
        rows["max_output"] = self._sampling.max_output_len
        if self._dataset.output_lengths is not None:
            rows["max_output"] = np.minimum(self._dataset.output_lengths[indices], self._sampling.max_output_len)
        rows["min_output"] = np.minimum(self._sampling.min_output_len, rows["max_output"])
        rows["temperature"] = self._sampling.temperature
        rows["top_k"] = self._sampling.top_k
        rows["top_p"] = self._sampling.top_p
        rows["seed"] = (indices + (self._sampling.seed * 1_000_003 & 0xFFFFFFFF)) & 0xFFFFFFFF
        rows["generation"] = NO_INSTANCE
        if self._dataset.ignores_stop is not None:
            rows["ignore_stop"] = self._dataset.ignores_stop[indices]
        self._window -= n
        self._route.send(self._leader, Tag.QUERY, Batch(rows, tokens).pack())

    def _take_slots(self, n: int) -> NDArray[np.uint32]:
        if n > len(self._free):
            size = len(self._active)
            grown = max(n, size, 1024)
            self._free = np.concatenate([self._free, np.arange(size + grown - 1, size - 1, -1, dtype=np.int64).astype(np.uint32)])
            for name in ("_active", "_held", "_sample_ids", "_indices", "_issued_at", "_first_at"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros(grown, old.dtype)]))
        slots, self._free = self._free[-n:].copy(), self._free[:-n]
        self._active[slots] = True
        self._held[slots] = self._holders
        self._first_at[slots] = 0
        return slots

    # --- answers ---

    def _on_window(self, received: Received) -> None:
        self._window += int(received.buffer.view(np.int64)[0])

    def _on_answers(self, received: Received) -> None:
        batch, _ = Batch.unpack(received.buffer)
        now = time.perf_counter()
        ids, flags = batch.rows["id"], batch.rows["flags"]
        starts, lengths = batch.offsets()[:-1], batch.rows["n_tokens"].astype(np.int64)
        final = (flags & ResponseFlag.FINAL) != 0
        # The generation instance's last token may overtake the context instance's first: then it brings the first as well. The first
        # tokens before the last ones, because both of an answer may be in one message.
        for kind in (flags & ResponseFlag.FIRST) != 0, final:
            first = kind & self._active[ids] & (self._first_at[ids] == 0) & (lengths > 0)
            if first.any():
                self._on_first(ids[first], batch.tokens, starts[first], now)
        if final.any():
            errors = (flags[final] & ResponseFlag.ERROR) != 0
            self._on_final(ids[final], batch.tokens, starts[final], lengths[final], errors, now)
        self._let_go(ids, flags)

    def _on_first(self, slots: NDArray[np.uint32], tokens: NDArray[np.int32], starts: NDArray[np.int64], now: float) -> None:
        self._first_at[slots] = now
        self.ttft.add(now - self._issued_at[slots])
        if self._test is not None and self._test.use_token_latencies:
            self._test.first_tokens(sample_responses(self._sample_ids[slots], tokens, starts, np.ones(len(slots), np.int64)))

    def _on_final(
        self,
        slots: NDArray[np.uint32],
        tokens: NDArray[np.int32],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        errors: NDArray[np.bool_],
        now: float,
    ) -> None:
        if not self._active[slots].all() or len(np.unique(slots)) != len(slots):
            raise RunError(Failure("a sample was answered twice"))
        self._active[slots] = False
        several = (lengths > 1) & (self._first_at[slots] > 0)
        self.tpot.add((now - self._first_at[slots[several]]) / (lengths[several] - 1))
        totals = self.totals
        totals.samples += len(slots)
        totals.errors += int(errors.sum())
        totals.tokens += int(lengths.sum())
        totals.ended = now
        if self._on_answer is not None:
            for index, start, length in zip(self._indices[slots].tolist(), starts.tolist(), lengths.tolist(), strict=True):
                self._on_answer(index, tokens[start : start + length])
        assert self._test is not None
        self._test.complete(sample_responses(self._sample_ids[slots], tokens, starts, lengths))

    def _let_go(self, slots: NDArray[np.uint32], flags: NDArray[np.uint32]) -> None:
        """Free the slots that no instance will speak of again.

        A request that was handed over ends twice, in either order: FINAL from one instance, CONTEXT_DONE from the other.
        """
        final, handed_over = (flags & ResponseFlag.FINAL) != 0, (flags & ResponseFlag.CONTEXT_DONE) != 0
        alone = final & ((flags & ResponseFlag.FIRST) != 0)  # the first token was the last one: nothing was handed over
        self._held[slots] -= np.where(alone, self._holders, (final | handed_over).astype(np.int64))
        freed = slots[(final | handed_over) & (self._held[slots] == 0)]
        if len(freed):
            self._free = np.concatenate([self._free, freed])
