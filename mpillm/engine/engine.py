"""The engine: requests in, tokens out, one step at a time. It decides what a step is; `step.Worker` runs it, here and on other ranks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpillm.engine.device import Sampled
from mpillm.engine.kv_cache import BlockAllocator
from mpillm.engine.model_config import ModelInfo
from mpillm.engine.scheduler import Scheduler, Sequence
from mpillm.engine.step import Step, Worker, pack


class Progress(NamedTuple):
    """A sequence that got its first token, its last, or both in a step."""

    sequence: Sequence
    is_first: bool
    is_final: bool


@dataclass(frozen=True)
class EngineLimits:
    """How much an engine does at once."""

    max_batch_size: int
    max_num_tokens: int  # of one step
    tokens_per_block: int
    chunked: bool = True


class Engine:
    """One copy of a model: on one rank, or on those that follow this one (see `step.Follower`)."""

    def __init__(self, info: ModelInfo, limits: EngineLimits, worker: Worker) -> None:
        self.info = info
        self.limits = limits
        self.worker = worker
        self.cache = worker.cache
        self._groups = worker.groups
        self._n_stages = worker.groups.layout.pp_size
        self._depth = self._n_stages + worker.n_ahead  # steps in flight
        self.blocks = BlockAllocator(info.kv_cache_tokens // limits.tokens_per_block)
        self.scheduler = Scheduler(
            self.blocks, limits.tokens_per_block, limits.max_batch_size, limits.max_num_tokens, limits.chunked, self._n_stages
        )
        self._end_ids = set(info.end_ids)
        # Steps: all sequences, those that get a token, and their tokens, where the first stage is the last.
        self._in_flight: deque[tuple[list[Sequence], list[Sequence], Sampled | None]] = deque()
        self._arrived: list[int] | None = None  # tokens of the oldest step in flight
        self._handing_over: dict[int, Sequence] = {}
        self._reserved: dict[int, tuple[list[int], NDArray[np.uint8]]] = {}

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
        return (len(self._in_flight) < self._depth and self.scheduler.can_plan()) or self._has_tokens()

    def is_idle(self) -> bool:
        """Whether `has_work` will stay False until something is added: no step is in flight."""
        return not self._in_flight and not self.scheduler.can_plan()

    def step(self) -> list[Progress]:
        """Start a step of at most `max_num_tokens` tokens, if there can be one more; who got a first or last token from those that ended.

        There are as many steps in flight as stages, each with sequences of its own, so that all stages have something to do. A worker that
        feeds a token to the next step by itself (`n_ahead`) gets that step before the token is read. What such a step computes for a
        sequence that turns out to have ended is dropped; its blocks may be another's by then, in steps that run later.
        """
        if len(self._in_flight) < self._depth and (plan := self.scheduler.plan()):
            sequences = [sequence for sequence, _ in plan]
            step, sampled = Step.of(plan)
            if self._groups.has_followers:
                self._groups.send_plan(pack(step, sequences))
            for sequence in sampled:
                sequence.n_unread += 1
            for sequence in sequences:
                most = 1 if sequence.hand_over else sequence.max_output
                sequence.in_flight = not self.worker.n_ahead or sequence.n_output >= most
            self._in_flight.append((sequences, sampled, self.worker.run(step)))
        progress: list[Progress] = []
        while self._has_tokens():
            assert self._arrived is not None
            sequences, sampled, _ = self._in_flight.popleft()
            for sequence in sampled:
                sequence.n_unread -= 1
            for sequence in sequences:
                sequence.in_flight &= sequence.n_unread > 0
            tokens, self._arrived = self._arrived, None
            progress += [p for sequence, token in zip(sampled, tokens, strict=True) if (p := self._append(sequence, token))]
        return progress

    def _has_tokens(self) -> bool:
        if self._arrived is None and self._in_flight:
            tokens = self._in_flight[0][2]
            if self._n_stages > 1:
                self._arrived = self._groups.take_tokens()
            elif tokens is not None and tokens.ready():
                self._arrived = tokens.take()
        return self._arrived is not None

    def _append(self, sequence: Sequence, token: int) -> Progress | None:
        if sequence.is_done:
            return None
        sequence.output.append(token)
        n = len(sequence.output)
        is_final = n >= sequence.max_output or token in self._end_ids
        if is_final:
            sequence.is_done = True
            self.scheduler.drop(sequence)
            self.scheduler.free(sequence)
        elif sequence.hand_over:
            self.scheduler.drop(sequence)
            self._handing_over[sequence.id] = sequence
        return Progress(sequence, n == 1, is_final) if n == 1 or is_final else None

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
        blocks = self.scheduler.reserve(n_prompt)
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
