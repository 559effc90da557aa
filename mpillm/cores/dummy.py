"""A core without a model: answers after a set time with tokens derived from the prompt; fails on demand.

It is for measurements of everything around a model, and for tests of fault handling.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError
from mpillm.comms.messages import NO_INSTANCE, RESPONSE, Batch, RequestFlag, ResponseFlag, concat
from mpillm.comms.tags import Tag
from mpillm.cores.base import CoreConfig, Credits, LLMCore, Metrics, NumericLimits
from mpillm.cores.dummy_options import DummyOptions, Faults
from mpillm.cores.dummy_stream import Streams

if TYPE_CHECKING:
    from mpillm.comms.communicators import InstanceComms
    from mpillm.comms.mover import Mover, Peer, TransferHandle
    from mpillm.telemetry.recorder import Clock

VOCAB_SIZE = 32000
_STREAM = int(RequestFlag.STREAM)  # a plain int: operations on enum flags take longer


def answer_tokens(prompts: Batch, n_output: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return the dummy's answers, back to back: token j is (hash of the prompt + j) % VOCAB_SIZE."""
    lengths = prompts.rows["n_tokens"].astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    if not len(starts):
        return np.zeros(0, np.int32)
    # The hash is the sum of token * (2 * place in the prompt + 1), computed from the places in the batch.
    odd = np.arange(1, 2 * len(prompts.tokens) + 1, 2)
    hashes = np.add.reduceat(prompts.tokens * odd, starts)
    hashes -= 2 * starts * np.add.reduceat(prompts.tokens, starts, dtype=np.int64)
    out_starts = np.cumsum(n_output) - n_output
    j = np.arange(int(n_output.sum())) + np.repeat(hashes % VOCAB_SIZE - out_starts, n_output)
    answers: NDArray[np.int32] = (j % VOCAB_SIZE).astype(np.int32)
    return answers


class DummyCore(LLMCore):
    """Core that runs at most `max_batch_size` requests if time is simulated, otherwise any number."""

    samples_each = False

    def __init__(
        self, config: CoreConfig, comms: InstanceComms | None = None, clock: Clock = time.perf_counter
    ) -> None:
        super().__init__(config, comms)
        self._clock = clock
        self.options = DummyOptions.from_options(config.options)
        self._max_batch_size = config.engine.scheduler.max_batch_size
        self._timed = self.options.ttft_ms > 0 or self.options.tpot_ms > 0
        self._instant: deque[Batch] = deque()
        self._waiting: deque[Batch] = deque()  # one request each
        self._running = 0
        self._prompt_tokens = self._generated_tokens = 0  # of contexts and answers that are complete
        # Each event: due time, order, flags, request, answer.
        self._events: list[tuple[float, int, int, Batch, NDArray[np.int32]]] = []
        self._streams = Streams(VOCAB_SIZE, self.options.tpot_ms / 1e3)
        self._cancelled: list[int] = []  # ids, not reported yet
        self._order = 0
        self._warm = False
        self._faults = Faults(self.options, config.rank)
        # The handoff, by request id: caches, computed caches, destinations, transfers, first tokens.
        self._kv: dict[int, NDArray[np.uint8]] = {}
        self._computed: set[int] = set()
        self._accepted: dict[int, tuple[int, int]] = {}
        self._transfers: dict[
            int, tuple[int, TransferHandle | None]
        ] = {}  # with the other instance; None: the instance was lost
        self._lost_peers: set[int] = set()
        self._never_done: list[TransferHandle | None] = []  # keeps the buffers that MPI may still touch
        self._first_tokens: dict[int, int] = {}
        self._cancelled_before: set[int] = set()  # ids cancelled while their KV cache was arriving
        self._started: list[int] = []
        self._kv_bytes = 0
        self._faults.in_phase("join")

    @classmethod
    def check(cls, config: CoreConfig) -> NumericLimits:
        DummyOptions.from_options(config.options)
        size, max_seq_len = config.engine.kv_cache_tokens, config.engine.max_seq_len
        if size is not None and max_seq_len is not None and max_seq_len > size:
            raise ConfigError(
                f"--kv_cache_tokens {size}: does not hold one sequence of --max_seq_len {max_seq_len} tokens",
                about=["kv_cache_tokens", "max_seq_len"],
            )
        return NumericLimits(max_seq_len=size) if size is not None else NumericLimits()

    # --- life ---

    def load(self) -> None:
        time.sleep(self.options.load_s)
        self._faults.in_phase("load")

    def run_health_check(self) -> None:
        self._faults.in_phase("health")

    def warm_up_requests(self) -> Batch:
        self._faults.in_phase("warmup")
        return super().warm_up_requests()

    def start_test(self) -> None:
        self._warm = True
        self._faults.start_test()
        self._kv_bytes = self._prompt_tokens = self._generated_tokens = 0

    def statistics(self) -> dict[str, float]:
        return {"kv_bytes": self._kv_bytes} if self.config.role == "context" else {}

    def metrics(self) -> Metrics:
        """Return counts by the clock, including tokens of unfinished answers. This core has no KV cache."""
        now = self._clock()
        in_progress = sum(
            self._generated_of(answer, due - now)
            for due, _, flags, _, answer in self._events
            if flags & ResponseFlag.FINAL
        )
        waiting = len(self._waiting) + sum(map(len, self._instant))
        running = self._running if self._timed else len(self._streams)
        return Metrics(self._prompt_tokens, self._generated_tokens + in_progress, running, waiting)

    # --- work ---

    def credits(self) -> Credits:
        n = 2 * self._max_batch_size if self._timed else 4096
        return Credits(n, self.config.engine.kv_cache_tokens or 1 << 40)

    def enqueue(self, requests: Batch) -> None:
        requests = self._faults.at_requests(requests)
        if self._timed:
            self._waiting += requests.split()
            return
        self._instant.append(requests)
        for row in requests.rows[self._hands_off(requests.rows)]:
            self._hold_kv(row)

    def cancel(self, ids: Iterable[int]) -> None:
        cancelled = {id_ for id_ in ids if id_ not in self._kv}
        if self.config.role == "generation":
            self._cancelled_before.update(self._kv.keys() & {*ids})
        ended = self._streams.remove(cancelled)
        in_progress = {int(request.rows["id"][0]) for _, _, _, request, _ in self._events} & cancelled
        self._events = [event for event in self._events if int(event[3].rows["id"][0]) not in cancelled]
        heapq.heapify(self._events)
        self._running -= (len(ended) + len(in_progress)) * self._timed
        self._cancelled += [*ended, *in_progress]
        for queue in (self._waiting, self._instant):
            for _ in range(len(queue)):
                batch = queue.popleft()
                matches = np.isin(batch.rows["id"], [*cancelled])
                self._cancelled += batch.rows["id"][matches].tolist()
                if not matches.all():
                    queue.append(batch.select(~matches) if matches.any() else batch)

    def poll_responses(self) -> Batch | None:
        if self._instant and not self._cancelled and not len(self._streams):
            return self._answer(self._instant.popleft())
        now = self._clock()
        ready = []
        if self._cancelled:
            rows = np.zeros(len(self._cancelled), RESPONSE)
            rows["id"], rows["flags"] = self._cancelled, ResponseFlag.FINAL | ResponseFlag.CANCELLED
            ready.append(Batch(rows, np.zeros(0, np.int32)))
            self._cancelled = []
        if self._instant:
            ready.append(self._answer(self._instant.popleft()))
        while self._waiting and self._running < self._max_batch_size:
            self._start(self._waiting.popleft(), now)
        while self._events and self._events[0][0] <= now:
            _, _, flags, request, answer = heapq.heappop(self._events)
            ready.append(self._due(request, flags, answer))
        if self._streams.is_due(now):
            step = self._streams.step(now)
            self._generated_tokens += len(step)
            self._running -= int((step.rows["flags"] & ResponseFlag.FINAL != 0).sum()) * self._timed
            ready.append(step)
        return concat(ready) if ready else None

    def has_work(self) -> bool:
        if self._instant or self._cancelled or (self._waiting and self._running < self._max_batch_size):
            return True
        now = self._clock()
        return (bool(self._events) and self._events[0][0] <= now) or self._streams.is_due(now)

    def quiet_s(self) -> float:
        if self._transfers:
            return 0.0
        due = min(self._events[0][0] if self._events else math.inf, self._streams.next_due())
        return due - self._clock()

    # --- handoff: one piece from root rank to root rank ---

    def connect(self, mover: Mover, peers: dict[int, Peer]) -> None:
        self._mover = mover
        self._peers = peers

    def poll_kv(self) -> list[int]:
        if not self._transfers:
            return []
        lost = self._lost_peers
        done = [
            id_
            for id_, (peer, transfer) in self._transfers.items()
            if peer in lost or (transfer and transfer.done())
        ]
        for id_ in done:
            peer, transfer = self._transfers.pop(id_)
            if peer in lost:
                self._never_done.append(transfer)
        return done

    def lose_peer(self, instance: int) -> None:
        self._lost_peers.add(instance)

    def release_kv(self, request_id: int) -> None:
        del self._kv[request_id]
        self._cancelled_before.discard(request_id)
        self._computed.discard(request_id)
        if self._timed and self.config.role == "context":
            self._running -= 1

    def started(self) -> list[int]:
        started, self._started = self._started, []
        return started

    def send_kv(self, request_id: int, receiver: int, slot: int) -> None:
        if request_id not in self._computed:
            self._accepted[request_id] = receiver, slot
            return
        buffer = self._kv[request_id]
        self._kv_bytes += buffer.nbytes
        transfer = None
        if receiver not in self._lost_peers:
            transfer = self._mover.send(self._peers[receiver].rank, Tag.KV + slot, buffer)
        self._transfers[request_id] = receiver, transfer

    def receive_kv(self, request: Batch, sender: int, slot: int) -> bool:
        if self._timed and self._running + len(self._waiting) + len(self._kv) >= self._max_batch_size:
            return False
        buffer = self._kv_buffer(int(request.rows["n_tokens"][0]))
        id_ = int(request.rows["id"][0])
        self._kv[id_] = buffer
        transfer = self._mover.receive(self._peers[sender].rank, Tag.KV + slot, buffer)
        self._transfers[id_] = sender, transfer
        return True

    def admit(self, request: Batch, first_token: int) -> None:
        id_ = int(request.rows["id"][0])
        if self._kv.pop(id_)[0] != id_ % 251:
            raise RuntimeError(f"the KV cache that arrived for request {id_} is another's")
        if id_ in self._cancelled_before:
            self._cancelled_before.remove(id_)
            self._cancelled.append(id_)
            return
        self._first_tokens[id_] = first_token
        self.enqueue(request)

    # --- internal ---

    def _kv_buffer(self, n_tokens: int) -> NDArray[np.uint8]:
        return np.zeros(max(8, n_tokens * self.options.kv_bytes_per_token), np.uint8)

    def _lengths(self, rows: NDArray[np.void]) -> NDArray[np.int64]:
        max_lengths = rows["max_output"].astype(np.int64)
        if self.options.output_mean <= 0:
            return max_lengths
        # A seed per request: the same request has the same length on any instance.
        samples = [
            np.random.default_rng(int(seed)).normal(self.options.output_mean, self.options.output_stdev)
            for seed in rows["seed"]
        ]
        min_lengths = np.maximum(rows["min_output"], 1)
        return np.clip(np.rint(samples).astype(np.int64), min_lengths, max_lengths)

    def _hands_off(self, rows: NDArray[np.void]) -> NDArray[np.bool_]:
        """Return which requests stop here after the first token and continue elsewhere."""
        if self.config.role != "context":
            return np.zeros(len(rows), np.bool_)
        continues_elsewhere: NDArray[np.bool_] = (rows["generation"] != NO_INSTANCE) & (
            self._lengths(rows) > 1
        )
        return continues_elsewhere

    def _answer(self, requests: Batch) -> Batch:
        """Return all responses of a batch immediately, without simulated time, and begin the streams."""
        context_only = self._hands_off(requests.rows)
        if np.bitwise_or.reduce(requests.rows["flags"]) & _STREAM:
            streamed = ~context_only & ((requests.rows["flags"] & _STREAM) != 0)
            self._begin_streams(requests.select(streamed), 0.0)
            requests, context_only = requests.select(~streamed), context_only[~streamed]
        rows = requests.rows
        n_output = np.where(context_only, 1, self._lengths(rows))
        out = np.zeros(len(rows), RESPONSE)
        out["id"] = rows["id"]
        out["n_tokens"] = n_output
        out["flags"] = np.where(
            context_only, int(ResponseFlag.FIRST), int(ResponseFlag.FIRST | ResponseFlag.FINAL)
        )
        for id_ in rows["id"][context_only].tolist():
            self._complete_kv(id_)
        tokens = answer_tokens(requests, n_output)
        self._generated_tokens += len(tokens)
        if self._first_tokens:
            self._generated_tokens -= len(rows)
            out["flags"] = ResponseFlag.FINAL
            self._check_first(rows, tokens, n_output)
        else:
            self._prompt_tokens += len(requests.tokens)
        return Batch(out, tokens)

    def _begin_streams(self, requests: Batch, first_at: float) -> None:
        n_output = self._lengths(requests.rows)
        tokens = answer_tokens(requests, n_output)
        admitted = bool(self._first_tokens)
        if admitted:
            self._check_first(requests.rows, tokens, n_output)
        else:
            self._prompt_tokens += len(requests.tokens)
        self._streams.add(
            requests.rows["id"], tokens[np.cumsum(n_output) - n_output], n_output, int(admitted), first_at
        )

    def _hold_kv(self, row: NDArray[np.void]) -> None:
        """Note that a context starts."""
        id_ = int(row["id"])
        self._kv[id_] = self._kv_buffer(int(row["n_tokens"]))
        self._started.append(id_)

    def _complete_kv(self, id_: int) -> None:
        """Note that a context is computed."""
        self._kv[id_][0] = id_ % 251
        self._computed.add(id_)
        if accepted := self._accepted.pop(id_, None):
            self.send_kv(id_, *accepted)

    def _check_first(
        self, rows: NDArray[np.void], tokens: NDArray[np.int32], n_output: NDArray[np.int64]
    ) -> None:
        starts = np.cumsum(n_output) - n_output
        for id_, token in zip(rows["id"].tolist(), tokens[starts].tolist(), strict=True):
            if self._first_tokens.pop(id_) != token:
                raise RuntimeError(f"request {id_} arrived with another request's first token")

    def _start(self, request: Batch, now: float) -> None:
        """Schedule a request's responses on the clock."""
        self._running += 1
        row = request.rows[0]
        admitted = int(row["id"]) in self._first_tokens
        if row["flags"] & RequestFlag.STREAM and not self._hands_off(request.rows)[0]:
            self._begin_streams(
                request, now + (self.options.tpot_ms if admitted else self.options.ttft_ms) / 1e3
            )
            return
        n_output = self._lengths(request.rows)
        answer = answer_tokens(request, n_output)
        if admitted:
            self._check_first(request.rows, answer, n_output)
        first_at = now if admitted else now + self.options.ttft_ms / 1e3
        if self._hands_off(request.rows)[0]:
            self._hold_kv(row)
            self._push(first_at, ResponseFlag.FIRST, request, answer[:1])
            return
        if n_output[0] == 1:
            self._push(
                first_at,
                ResponseFlag.FINAL if admitted else ResponseFlag.FIRST | ResponseFlag.FINAL,
                request,
                answer,
            )
            return
        if not admitted:
            self._push(first_at, ResponseFlag.FIRST, request, answer[:1])
        last_at = first_at + (int(n_output[0]) - 1) * self.options.tpot_ms / 1e3
        self._push(last_at, ResponseFlag.FINAL, request, answer)

    def _generated_of(self, answer: NDArray[np.int32], left_s: float) -> int:
        """Return how many tokens exist now of an answer that will be complete in `left_s` seconds."""
        n_tokens = len(answer) - (
            self.config.role == "generation"
        )  # the first token is the context instance's
        if left_s <= 0:
            return n_tokens
        return max(0, int(n_tokens - left_s * 1e3 / self.options.tpot_ms)) if self.options.tpot_ms else 0

    def _push(self, due: float, flags: int, request: Batch, answer: NDArray[np.int32]) -> None:
        self._order += 1
        heapq.heappush(self._events, (due, self._order, flags, request, answer))

    def _due(self, request: Batch, flags: int, answer: NDArray[np.int32]) -> Batch:
        row = request.rows[0]
        if flags & ResponseFlag.FIRST:
            self._prompt_tokens += len(request.tokens)
        if flags & ResponseFlag.FINAL:
            self._running -= 1
            self._generated_tokens += self._generated_of(answer, 0.0)
        elif self.config.role == "context":
            self._complete_kv(int(row["id"]))
            self._generated_tokens += 1
        return Batch(np.array([(row["id"], len(answer), flags)], RESPONSE), answer)
