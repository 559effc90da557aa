"""Harness: turns issued samples into requests, and passes the instances' responses on, usually to LoadGen."""

from __future__ import annotations

import math
import secrets
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mpillm.comms.messages import (
    ANSWER,
    CANCEL,
    NO_INSTANCE,
    PROMPT_COUNTS,
    QUERY,
    REQUEST,
    WINDOW,
    Batch,
    Refusal,
    RequestFlag,
    ResponseFlag,
    index_of,
)
from mpillm.cores.histogram import Histogram
from mpillm.data.dataset import Dataset
from mpillm.errors import Failure, RunError
from mpillm.loadgen.sut import Query
from mpillm.phases import Phase
from mpillm.roles.cancellations import Cancellations
from mpillm.roles.role import Role

if TYPE_CHECKING:  # at run time, this import would start MPI
    from mpillm.comms.transport import Transport

# Plain ints: with an enum flag, a NumPy operation takes three times as long.
_IGNORE_STOP, _MESSAGE = int(RequestFlag.IGNORE_STOP), int(ResponseFlag.MESSAGE)
_FIRST, _FINAL, _ERROR = int(ResponseFlag.FIRST), int(ResponseFlag.FINAL), int(ResponseFlag.ERROR)
_CONTEXT_DONE, _LOST = int(ResponseFlag.CONTEXT_DONE), int(ResponseFlag.LOST)
_PROMPT_COUNTS, _REFUSED = int(ResponseFlag.PROMPT_COUNTS), int(ResponseFlag.REFUSED)
_CANCELLED, _CANCEL_DONE = int(ResponseFlag.CANCELLED), int(ResponseFlag.CANCEL_DONE)
_MAX_BATCH = 1024  # requests per message
_NO_COUNTS = -1, -1
_UNKNOWN, _NO_SESSION = np.array(_NO_COUNTS, PROMPT_COUNTS), np.uint32(0)
_NO_MEMORY = (
    "out of memory: it builds the list of all queries before the test; lower --min_query_count,"
    " --min_duration or the expected rate (--offline_expected_qps, --server_target_qps)"
)


@dataclass(frozen=True)
class SamplingOptions:
    """Options for generating the responses of a run."""

    max_output_len: int
    min_output_len: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    cache_salt: str | None = None  # what has a salt of its own: "test", "conversation" or "request"


@dataclass
class LossCosts:
    """Costs of an instance's loss."""

    retried: int = 0  # number of resent samples
    waited_s: float = 0.0  # from a sample's issue to the loss, summed over the resent samples
    recovered: float = 0.0  # time.perf_counter() of the last response to a resent sample


@dataclass
class Totals:
    """Running totals of a test, of constant size: nothing is kept for each sample."""

    issued: int = 0
    samples: int = 0
    errors: int = 0
    cancelled: int = 0  # by this rank, before their responses were complete; in no other figure but `issued`
    tokens: int = 0
    started: float = 0.0  # time.perf_counter(); 0: not started
    ended: float = 0.0
    ttft: Histogram = field(default_factory=Histogram)
    tpot: Histogram = field(default_factory=Histogram)
    latency: Histogram = field(default_factory=Histogram)  # from issue to the complete response
    losses: dict[int, LossCosts] = field(default_factory=dict)  # key: a lost instance that had open requests

    @property
    def lasted_s(self) -> float:
        """Seconds from the test's start to the last answer; 0 without an answer."""
        return max(0.0, self.ended - self.started)


class RequestSource(Protocol):
    """Source of a test's requests: LoadGen (`mpillm.loadgen.sut`), or conversations (`conversation_load`)."""

    issued: deque[Query]  # the harness takes them
    error: BaseException | None
    use_token_latencies: bool  # whether it needs first tokens
    request_flags: int  # `RequestFlag`s of all requests

    @property
    def finished(self) -> bool:
        """Whether the test has ended."""

    def start(self) -> None:
        """Start the test."""

    def first_tokens(self, ids: list[int], tokens: NDArray[np.int32], starts: list[int]) -> None:
        """Take the first tokens of requests: ``tokens[start]`` for each start."""

    def complete(
        self, ids: list[int], tokens: NDArray[np.int32], starts: list[int], lengths: list[int], is_error: bool
    ) -> None:
        """Take responses, ``tokens[start : start + length]``, before this returns."""

    def message(self, id_: int, text: bytes) -> None:
        """Take a response's JSON as a message of a chat, before `complete`."""

    def refused(self, id_: int, refusal: Refusal) -> None:
        """Take a server's reason for an error, before `complete`."""


class OnAnswer(Protocol):
    """Receives responses."""

    def __call__(self, index: int, tokens: NDArray[np.int32], prompt: NDArray[np.int32] | None) -> None:
        """Take the response to the sample at `index`; `prompt`: None if it is in the data set."""


class Log(Protocol):
    """Log of responses: see `mpillm.report.request_log.RequestLog`."""

    def add(
        self,
        issued: NDArray[np.float64],
        first: NDArray[np.float64],
        ended: float,
        index: NDArray[np.int64],
        tokens: NDArray[np.int64],
        error: NDArray[np.bool_],
        counts: NDArray[np.void],
        sessions: NDArray[np.uint32],
    ) -> None:
        """Add responses that arrived at `ended`; times are in seconds since the test's start.

        `counts`: of the prompts, `PROMPT_COUNTS`. `sessions`: of conversations; 0: of none.
        """

    def add_one(
        self,
        issued: float,
        first: float,
        ended: float,
        index: int,
        tokens: int,
        error: bool,
        counts: tuple[int, int],
        session: int,
    ) -> None:
        """Add one response."""


class Harness(Role):
    """Role that has LoadGen and the data set.

    Each open sample has a slot. In messages, the slot number is the id of the sample's request.
    """

    sends_requests = True

    def __init__(
        self,
        route: Transport,
        leader: int,
        dataset: Dataset,
        sampling: SamplingOptions,
        test: RequestSource,
        on_answer: OnAnswer | None,
        has_handoff: bool,
        totals: Totals,
        log: Log | None = None,
    ) -> None:
        """`leader`: the leader's rank.

        `has_handoff`: whether context instances hand off requests to generation instances. The harness calls
        `on_answer` for each response. It updates `totals`, and adds every
        response to `log`.
        """
        self._route = route
        self._leader = leader
        self._dataset = dataset
        self._sampling = sampling
        self._test = test
        self._on_answer = on_answer
        self._holders = 2 if has_handoff else 1
        self._window = 0
        self._pending: deque[Query] = deque()
        self._totals = totals
        self._log = log
        self._free = np.zeros(0, np.uint32)  # the first `_n_free` elements are the stack of free slots
        self._n_free = 0
        # Indexed by slot:
        self._retried: dict[int, LossCosts] = {}  # open requests that were resent after a loss
        self._own_prompts: dict[int, NDArray[np.int32]] = {}  # that are not in the data set
        self._active = np.zeros(0, np.bool_)  # whether the sample has no final response yet
        self._n_senders = np.zeros(0, np.int64)  # number of instances that may still send rows of the sample
        self._sample_ids = np.zeros(0, np.uint64)
        self._sessions, self._has_sessions = np.zeros(0, np.uint32), False
        self._counts_prompts = bool(test.request_flags & RequestFlag.PROMPT_COUNTS)
        self._prompt_counts = np.zeros(0, PROMPT_COUNTS)  # only used if instances report them
        self._first_salt, self._n_salted = np.uint64(1 + secrets.randbits(62)), 0
        self._indices = np.zeros(0, np.int64)
        self._issued_at = np.zeros(0)
        self._first_at = np.zeros(0)  # NaN: no token has arrived
        self._cancellations: Cancellations | None = None  # None: no request of this test is cancelled
        self._place = np.zeros(0, np.int64)  # scratch array with which `_on_final` finds duplicate slots
        self._requests = self._make_requests()
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
        return self._test.finished and not (self._cancellations and self._cancellations.unconfirmed)

    def quiet_s(self) -> float:
        return math.inf if self._cancellations is None else self._cancellations.quiet_s()

    def poll(self) -> bool:
        issued = self._test.issued
        while issued:
            query = issued.popleft()
            self._totals.issued += len(query.ids)
            self._pending.append(query)
        worked = self._cancel_due()  # first: requests that are sent below are not cancelled in the same step
        while self._pending and self._window > 0:
            self._send_next()
            worked = True
        return worked

    # --- requests ---

    def _cancel_due(self) -> bool:
        if self._cancellations is None or not (slots := self._cancellations.due()):
            return False
        self._n_senders[slots] += 1  # the row with CANCEL_DONE
        CANCEL.send(self._route, self._leader, slots)
        return True

    def _send_next(self) -> None:
        query = self._pending[0]
        n = min(len(query.ids), self._window, _MAX_BATCH)
        if n == len(query.ids):
            self._pending.popleft()
        else:
            query, self._pending[0] = query.split(n)
        slots = self._take_slots(n)
        if query.prompts is not None:
            own = zip(slots.tolist(), query.prompts, strict=True)
            self._own_prompts.update((slot, prompt) for slot, prompt in own if prompt is not None)
        at = index_of(slots)
        self._sample_ids[at] = query.ids
        self._indices[at] = query.indices
        if query.sessions is not None:
            self._sessions[at], self._has_sessions = query.sessions, True
        self._issued_at[at] = query.issued
        self._send(slots)
        if query.cancel_after is not None:
            self._cancellations = self._cancellations or Cancellations()
            self._cancellations.add(slots.tolist(), query.cancel_after.tolist())

    def _send(self, slots: NDArray[np.uint32]) -> None:
        """Send the requests of these slots, for the first time or again."""
        at = index_of(slots)
        indices = self._indices[at]
        self._active[at] = True
        self._n_senders[at] = self._holders
        rows = self._requests.take(indices)
        rows["id"] = slots
        if self._has_sessions:
            rows["session"] = self._sessions[at]
        if self._sampling.cache_salt:
            rows["salt"] = self._salts(at, len(slots))
        self._window -= len(slots)
        tokens = self._dataset.gather(indices)[1] if not self._own_prompts else self._with_own(rows, indices)
        QUERY.send(self._route, self._leader, Batch(rows, tokens))

    def _salts(self, at: NDArray[np.integer[Any]] | slice, n: int) -> NDArray[np.uint64]:
        """Return the salts of the requests in the slots `at`."""
        shared_by = self._sampling.cache_salt
        if shared_by == "request":
            self._n_salted += n
            return self._first_salt + np.arange(self._n_salted - n, self._n_salted, dtype=np.uint64)
        sessions = self._sessions[at].astype(np.uint64)
        return self._first_salt + (sessions if shared_by == "conversation" else 0 * sessions)

    def _with_own(self, rows: NDArray[np.void], indices: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the tokens of requests some of whose prompts are not in the data set; set their lengths."""
        prompts = [
            self._dataset.sample(index) if (own := self._own_prompts.get(slot)) is None else own
            for slot, index in zip(rows["id"].tolist(), indices.tolist(), strict=True)
        ]
        rows["n_tokens"] = [len(prompt) for prompt in prompts]
        return np.concatenate(prompts)

    def _make_requests(self) -> NDArray[np.void]:
        """Return the requests of all data set samples, without ids. They are prepared once, for speed."""
        dataset, sampling = self._dataset, self._sampling
        rows = np.zeros(len(dataset), REQUEST)
        rows["n_tokens"] = dataset.n_tokens
        rows["max_output"] = sampling.max_output_len
        if dataset.output_lengths is not None:
            rows["max_output"] = np.minimum(dataset.output_lengths, sampling.max_output_len)
        rows["min_output"] = np.minimum(sampling.min_output_len, rows["max_output"])
        if dataset.exact_lengths:
            rows["min_output"] = rows["max_output"]
        rows["temperature"] = sampling.temperature
        rows["top_k"] = sampling.top_k
        rows["top_p"] = sampling.top_p
        first_seed = sampling.seed * 1_000_003 & 0xFFFFFFFF
        rows["seed"] = (np.arange(len(dataset)) + first_seed) & 0xFFFFFFFF
        for column, values in dataset.sampling.items():
            is_own = ~np.isnan(values)
            limit = rows["max_output"][is_own] if column == "min_output" else np.inf
            rows[column][is_own] = np.minimum(values[is_own], limit)
        rows["generation"] = NO_INSTANCE
        rows["flags"] = self._test.request_flags
        if dataset.ignores_stop is not None:
            rows["flags"] |= dataset.ignores_stop * np.uint32(_IGNORE_STOP)
        return rows

    def _take_slots(self, n: int) -> NDArray[np.uint32]:
        if n > self._n_free:
            size = len(self._active)
            grown = max(n, size, 1024)
            new = np.arange(size + grown - 1, size - 1, -1, dtype=np.int64).astype(np.uint32)
            self._free = np.concatenate(
                [self._free[: self._n_free], new, np.zeros(size - self._n_free, np.uint32)]
            )
            self._n_free += grown
            of_slots = (
                *("_active", "_n_senders", "_sample_ids", "_sessions", "_prompt_counts"),
                *("_indices", "_issued_at", "_first_at", "_place"),
            )
            for name in of_slots:
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros(grown, old.dtype)]))
        self._n_free -= n
        slots = self._free[self._n_free : self._n_free + n].copy()
        at = index_of(slots)
        self._first_at[at] = np.nan
        if self._counts_prompts:
            self._prompt_counts[at] = _NO_COUNTS
        return slots

    def _send_again(self, slots: NDArray[np.uint32], instance: int, now: float) -> None:
        """Resend the outstanding requests of a lost instance. LoadGen does not notice."""
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
        if len(ids) == 1:
            self._on_one(int(ids[0]), int(flags[0]), batch.tokens, now)
            return
        lengths = batch.rows["n_tokens"].astype(np.int64)
        starts = lengths.cumsum() - lengths
        if self._cancellations is not None:  # requests end in several ways: handle row by row
            columns = [column.tolist() for column in (ids, flags, starts, lengths)]
            for slot, kind, start, n in zip(*columns, strict=True):
                self._on_one(slot, kind, batch.tokens[start : start + n], now)
            return
        # Usually all rows have the same flags. Otherwise, grouping by flags changes the order of the rows.
        # This is harmless: FIRST, FINAL and CONTEXT_DONE of a request may come in any order. MESSAGE,
        # PROMPT_COUNTS and REFUSED, the largest flags, come before FINAL. The first call of `np.unique` would
        # import `numpy.ma`, which takes 50 ms in the test.
        kinds = sorted({*flags.tolist()}, reverse=True)
        for kind in kinds:
            part = slice(None) if len(kinds) == 1 else flags == kind
            self._on_kind(kind, ids[part], batch.tokens, starts[part], lengths[part], now)

    def _on_one(self, slot: int, kind: int, tokens: NDArray[np.int32], now: float) -> None:
        """Handle one response as `_on_kind` does, but without NumPy arrays: four times as fast."""
        test, totals, length = self._test, self._totals, len(tokens)
        may_be_cancelled = self._cancellations is not None and slot in self._cancellations
        id_, issued, first = (
            values[slot].item() for values in (self._sample_ids, self._issued_at, self._first_at)
        )
        if kind & (_FIRST | _FINAL) and math.isnan(first) and length:
            self._first_at[slot] = first = now
            if not may_be_cancelled:
                totals.ttft.add_one(now - issued)
            if test.use_token_latencies:
                test.first_tokens([id_], tokens, [0])
        if kind & _FINAL:
            if not self._active[slot]:
                raise RunError(Failure("a sample was answered twice"))
            self._active[slot] = False
            prompt = self._own_prompts.pop(slot, None)
            self._first_at[slot] = now  # ignore a later FIRST
            if self._cancellations is not None:
                self._cancellations.ended(slot)
            if kind & _CANCELLED:
                totals.cancelled += 1
                test.complete([id_], tokens, [0], [0], False)
                self._free_one(slot, kind)
                return
            if may_be_cancelled and not math.isnan(first):
                totals.ttft.add_one(first - issued)
            if length > 1:
                totals.tpot.add_one((now - first) / (length - 1))
            totals.latency.add_one(now - issued)
            if (loss := self._retried.pop(slot, None)) is not None:
                loss.recovered = now
            is_error = bool(kind & _ERROR)
            totals.samples += 1
            totals.errors += is_error
            totals.tokens += length
            totals.ended = now
            index, began = int(self._indices[slot]), totals.started
            if self._log is not None:
                times = issued - began, first - began, now - began
                counts = self._prompt_counts[slot].item() if self._counts_prompts else _NO_COUNTS
                session = int(self._sessions[slot])
                self._log.add_one(*times, index, length, is_error, counts, session)
            if self._on_answer is not None:
                self._on_answer(index, tokens, prompt)
            test.complete([id_], tokens, [0], [length], is_error)
        elif kind & _MESSAGE:
            test.message(id_, tokens.astype(np.uint8).tobytes())
        elif kind & _PROMPT_COUNTS:
            self._prompt_counts[slot] = tuple(tokens.tolist())
        elif kind & _REFUSED:
            test.refused(id_, Refusal.of(tokens.tolist()))
        self._free_one(slot, kind)

    def _on_kind(
        self,
        kind: int,
        slots: NDArray[np.uint32],
        tokens: NDArray[np.int32],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        now: float,
    ) -> None:
        """Handle responses of one `kind`, a combination of `ResponseFlag`s."""
        if kind & (_FIRST | _FINAL):
            # FINAL from the generation instance may overtake FIRST from the context instance. FINAL then
            # also serves as FIRST.
            first = np.isnan(self._first_at[index_of(slots)]) & (lengths > 0)
            n_first = np.count_nonzero(first)
            if n_first == len(slots):
                self._on_first(slots, tokens, starts, now)
            elif n_first:
                self._on_first(slots[first], tokens, starts[first], now)
        if kind & _MESSAGE:
            for slot, start, length in zip(slots.tolist(), starts.tolist(), lengths.tolist(), strict=True):
                text = tokens[start : start + length].astype(np.uint8).tobytes()
                self._test.message(self._sample_ids[slot].item(), text)
        if kind & _PROMPT_COUNTS:
            for name, values in (("prompt", tokens[starts]), ("cached", tokens[starts + 1])):
                self._prompt_counts[name][slots] = values
        if kind & _REFUSED:
            for slot, start, length in zip(slots.tolist(), starts.tolist(), lengths.tolist(), strict=True):
                refusal = Refusal.of(tokens[start : start + length].tolist())
                self._test.refused(self._sample_ids[slot].item(), refusal)
        if kind & _FINAL:
            self._on_final(slots, tokens, starts, lengths, bool(kind & _ERROR), now)
        if kind & (_FINAL | _CONTEXT_DONE):
            self._free_slots(slots, alone=kind & (_FIRST | _FINAL) == _FIRST | _FINAL)

    def _on_first(
        self, slots: NDArray[np.uint32], tokens: NDArray[np.int32], starts: NDArray[np.int64], now: float
    ) -> None:
        at = index_of(slots)
        self._first_at[at] = now
        self._totals.ttft.add(now - self._issued_at[at])
        if self._test.use_token_latencies:
            self._test.first_tokens(self._sample_ids[at].tolist(), tokens, starts.tolist())

    def _on_final(
        self,
        slots: NDArray[np.uint32],
        tokens: NDArray[np.int32],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        is_error: bool,
        now: float,
    ) -> None:
        n, at = len(slots), index_of(slots)
        if np.count_nonzero(self._active[at]) < n:
            raise RunError(Failure("a sample was answered twice"))
        self._active[at] = False
        if n > 1:  # `_place` keeps only the last position of a slot that occurs twice
            places = np.arange(n)
            self._place[at] = places
            if np.count_nonzero(self._place[at] == places) < n:
                raise RunError(Failure("a sample was answered twice in one message"))
        prompts = (
            [self._own_prompts.pop(slot, None) for slot in slots.tolist()] if self._own_prompts else None
        )
        indices = self._indices[at].copy()
        issued, first = self._issued_at[at], self._first_at[at].copy()
        self._first_at[at] = now  # ignore a later FIRST
        totals = self._totals
        several = lengths > 1
        part = slice(None) if np.count_nonzero(several) == n else several
        totals.tpot.add((now - first[part]) / (lengths[part] - 1))
        totals.latency.add(now - issued)
        if self._retried:
            for slot in slots.tolist():
                if (loss := self._retried.pop(slot, None)) is not None:
                    loss.recovered = now
        totals.samples += n
        totals.errors += n * is_error
        totals.tokens += int(lengths.sum())
        totals.ended = now
        if self._log is not None:
            began, errors = totals.started, (np.ones if is_error else np.zeros)(n, np.bool_)
            counts_of, sessions = np.broadcast_to(_UNKNOWN, n), np.broadcast_to(_NO_SESSION, n)
            if self._counts_prompts:
                counts_of = self._prompt_counts[at].copy()
            if self._has_sessions:
                sessions = self._sessions[at].copy()
            self._log.add(
                issued - began, first - began, now - began, indices, lengths, errors, counts_of, sessions
            )
        from_, counts = starts.tolist(), lengths.tolist()
        if self._on_answer is not None:
            responses = zip(indices.tolist(), from_, counts, prompts or [None] * n, strict=True)
            for index, start, length, prompt in responses:
                self._on_answer(index, tokens[start : start + length], prompt)
        self._test.complete(self._sample_ids[at].tolist(), tokens, from_, counts, is_error)

    def _free_one(self, slot: int, kind: int) -> None:
        """Free a slot after its last row."""
        if kind & (_FINAL | _CONTEXT_DONE):
            self._free_slots(np.array([slot]), alone=kind & (_FIRST | _FINAL) == _FIRST | _FINAL)
        if kind & _CANCEL_DONE and self._cancellations is not None:
            self._cancellations.confirmed(slot)
            self._free_slots(np.array([slot]), alone=False)

    def _free_slots(self, slots: NDArray[np.uint32], *, alone: bool) -> None:
        """Free the slots for which no instance sends further responses.

        In a disaggregated run, a request that was offered to a generation instance ends twice, in either
        order: with FINAL, and with CONTEXT_DONE from the context instance. `alone`: these rows have both
        FIRST and FINAL. Such a request was never offered, so no CONTEXT_DONE follows.

        A row with CANCEL_DONE follows each cancellation, before or after the row with FINAL. Until then, the
        cancellation could hit another request with this slot.
        """
        if self._holders > 1 or self._cancellations is not None:
            at = index_of(slots)
            self._n_senders[at] -= self._holders if alone else 1
            slots = slots[self._n_senders[at] == 0]
        self._free[self._n_free : self._n_free + len(slots)] = slots
        self._n_free += len(slots)
