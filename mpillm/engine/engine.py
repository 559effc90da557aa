"""The engine: requests in, tokens out, one step at a time. It decides what a step is; `step.Worker` runs it, here and on other ranks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpillm.engine.kv_cache import BlockAllocator
from mpillm.engine.model_config import ModelInfo
from mpillm.engine.prefix_cache import PrefixCache
from mpillm.engine.scheduler import Scheduler, Sequence
from mpillm.engine.step import Step, Worker, pack


class Progress(NamedTuple):
    """A sequence that got its first token, its last, or both in a step; or is final because it was cancelled."""

    sequence: Sequence
    is_first: bool
    is_final: bool


@dataclass(frozen=True)
class EngineLimits:
    """How much an engine does at once, and who goes first."""

    max_batch_size: int
    max_num_tokens: int  # of one step
    tokens_per_block: int
    chunked: bool = True
    policy: str = "max_util"  # see `Scheduler`
    chunking: str = "first_come_first_served"
    reuse: bool = False  # of blocks that hold a common prefix


class Engine:
    """One copy of a model: on one rank, or on those that follow this one (see `step.Follower`)."""

    def __init__(self, info: ModelInfo, limits: EngineLimits, worker: Worker) -> None:
        self.info = info
        self.limits = limits
        self.worker = worker
        self.cache = worker.cache
        self._groups = worker.groups
        self._n_stages = worker.groups.layout.pp_size
        size, n_blocks = limits.tokens_per_block, info.kv_cache_tokens // limits.tokens_per_block
        self.blocks = PrefixCache(n_blocks, size) if limits.reuse else BlockAllocator(n_blocks)
        self.scheduler = Scheduler(
            self.blocks,
            size,
            limits.max_batch_size,
            limits.max_num_tokens,
            limits.chunked,
            self._n_stages,
            limits.policy,
            limits.chunking,
        )
        self._end_ids = set(info.end_ids)
        self._stops: dict[int, list[list[int]]] = {}  # stop words by their last token
        for tokens in info.stop_words:
            self._stops.setdefault(tokens[-1], []).append(list(tokens))
        self._in_flight: deque[tuple[list[Sequence], list[Sequence]]] = deque()  # steps: all sequences, those that get a token
        self._arrived: list[int] | None = None  # tokens of the oldest step in flight
        self._handing_over: dict[int, Sequence] = {}
        self._reserved: dict[int, tuple[list[int], NDArray[np.uint8]]] = {}
        self._cancelled: list[Sequence] = []  # `step` has not told yet
        self._cancelled_before: set[int] = set()  # while their KV cache was on its way here

    # --- work ---

    def refusal(self, sequence: Sequence) -> str | None:
        """Why this engine can never answer `sequence`, or None."""
        n = len(sequence.prompt)
        if n == 0 or sequence.max_output == 0:
            return f"{n} prompt tokens and at most {sequence.max_output} output tokens: at least one of each is needed"
        if not 0 <= min(sequence.prompt) <= max(sequence.prompt) < self.info.vocab_size:
            return f"a prompt token is not in the vocabulary (0 to {self.info.vocab_size - 1})"
        n_total = n + (1 if sequence.hand_over else sequence.max_output)
        if n_total > self.info.max_seq_len:
            return f"{n} prompt tokens and {n_total - n} output tokens exceed max_seq_len {self.info.max_seq_len}"
        if n > self.limits.max_num_tokens and not self.limits.chunked:
            return f"{n} prompt tokens exceed max_num_tokens {self.limits.max_num_tokens}, and chunked context is off"
        return None

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that `refusal` has nothing against."""
        self.scheduler.add(sequence)

    def has_work(self) -> bool:
        """Whether `step` has something to do now."""
        return (len(self._in_flight) < self._n_stages and self.scheduler.can_plan()) or self._has_tokens() or bool(self._cancelled)

    def cancel(self, sequence_id: int) -> None:
        """End it where it is: queued, in context, in generation, or while its KV cache is on its way here; `step` tells, once.

        One that is in a step in flight ends with that step: until then its blocks are written to. Nothing happens to one that is not
        here any more, or waits for `release_kv`: it is the receiver's to cancel, and its blocks come back with the release.
        """
        if sequence_id in self._reserved:
            self._cancelled_before.add(sequence_id)
        for sequence in (*self.scheduler.running, *self.scheduler.waiting):
            if sequence.id == sequence_id:
                sequence.is_cancelled = True
                if not sequence.in_flight:
                    self._end_cancelled(sequence)

    def _end_cancelled(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        self._cancelled.append(sequence)

    def step(self) -> list[Progress]:
        """Start a step of at most `max_num_tokens` tokens, if there can be one more; who got a first or last token from those that ended.

        There are as many steps in flight as stages, each with sequences of its own, so that all stages have something to do.
        """
        if len(self._in_flight) < self._n_stages and (plan := self.scheduler.plan()):
            sequences = [sequence for sequence, _ in plan]
            step, sampled = Step.of(plan)
            self.scheduler.publish(plan)
            if self._groups.has_followers:
                self._groups.send_plan(pack(step, sequences))
            for sequence in sequences:
                sequence.in_flight = True
            self._in_flight.append((sequences, sampled))
            tokens = self.worker.run(step)
            if self._n_stages == 1:
                self._arrived = tokens
        progress: list[Progress] = []
        while self._has_tokens():
            assert self._arrived is not None
            sequences, sampled = self._in_flight.popleft()
            for sequence in sequences:
                sequence.in_flight = False
                if sequence.is_cancelled:
                    self._end_cancelled(sequence)
            tokens, self._arrived = self._arrived, None
            progress += [p for sequence, token in zip(sampled, tokens, strict=True) if (p := self._append(sequence, token))]
        progress += [Progress(sequence, is_first=False, is_final=True) for sequence in self._cancelled]
        self._cancelled.clear()
        return progress

    def _has_tokens(self) -> bool:
        if self._arrived is None and self._in_flight and self._n_stages > 1:
            self._arrived = self._groups.take_tokens()
        return self._arrived is not None

    def _append(self, sequence: Sequence, token: int) -> Progress | None:
        if sequence.is_cancelled:
            return None
        sequence.output.append(token)
        n = len(sequence.output)
        is_final = n >= sequence.max_output or token in self._end_ids or self._is_stopped(sequence)
        if is_final:
            self.scheduler.drop(sequence)
            self.scheduler.free(sequence)
        elif sequence.hand_over:
            self.scheduler.drop(sequence)
            self._handing_over[sequence.id] = sequence
        return Progress(sequence, n == 1, is_final) if n == 1 or is_final else None

    def _is_stopped(self, sequence: Sequence) -> bool:
        """Whether its answer ends with a stop word, and may end."""
        words, output = self._stops.get(sequence.output[-1], ()), sequence.output
        return len(output) >= sequence.min_output and any(output[-len(word) :] == word for word in words)

    # --- handoff ---

    def export_kv(self, sequence_id: int) -> NDArray[np.uint8]:
        """The prompt's KV cache, in `KVCache`'s form of the handoff."""
        sequence = self._handing_over[sequence_id]
        return self.cache.read(sequence.blocks, len(sequence.prompt))

    def release_kv(self, sequence_id: int) -> None:
        self.scheduler.free(self._handing_over.pop(sequence_id))

    def reserve_kv(self, sequence_id: int, n_prompt: int, max_output: int) -> NDArray[np.uint8] | None:
        """A buffer of the size of the sender's `export_kv`, or None while there is no room; ValueError if there never will be."""
        if n_prompt + max_output > self.info.max_seq_len:
            raise ValueError(
                f"request {sequence_id}: {n_prompt} prompt tokens and {max_output} output tokens exceed max_seq_len {self.info.max_seq_len}"
            )
        blocks = self.scheduler.reserve(n_prompt, n_prompt + max_output - 1)
        if blocks is None:
            return None
        buffer = np.empty(self.cache.handoff_bytes(n_prompt), np.uint8)
        self._reserved[sequence_id] = (blocks, buffer)
        return buffer

    def admit(self, sequence: Sequence) -> None:
        """Go on with a sequence whose buffer is filled and whose `output` holds its first token."""
        sequence.blocks, buffer = self._reserved.pop(sequence.id)
        sequence.n_cached = len(sequence.prompt)
        self.cache.write(sequence.blocks, sequence.n_cached, buffer)
        self.scheduler.admit(sequence)
        if sequence.id in self._cancelled_before:
            self._cancelled_before.remove(sequence.id)
            self.cancel(sequence.id)
