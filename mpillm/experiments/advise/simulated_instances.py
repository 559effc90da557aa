"""Simulated instance of the embedded engine: the real scheduler with simulated time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from mpillm.engine.schedule.block_allocator import BlockAllocator
from mpillm.engine.schedule.sampling_params import SamplingParams
from mpillm.engine.schedule.scheduler import Scheduler
from mpillm.engine.schedule.sequence import Sequence
from mpillm.engine.shape.engine_config import SchedulerConfig
from mpillm.experiments.advise.step_times import StepTimes


@dataclass(eq=False)
class SimulatedRequest:
    """A request for a sample. Times are seconds since the start of the test, -1 while unknown."""

    n_prompt: int
    n_output: int  # tokens of the final output
    max_output: int
    issued: float = 0.0
    first: float = -1.0
    ended: float = -1.0
    entry: int = -1  # instances, by position in their pools
    generation: int = -1

    @property
    def needs(self) -> int:
        """KV tokens that the leader counts."""
        return self.n_prompt + self.max_output


class Instance(Protocol):
    """An aggregated, context or generation instance."""

    ranks: int

    def add(self, request: SimulatedRequest) -> None:
        """Queue a request."""
        ...

    def poll(self, now: float) -> None:
        """Start work that can start."""
        ...

    def work(self) -> float | None:
        """Return the seconds until some work ends, alone on its CPU cores; None if there is no work."""
        ...

    def advance(self, seconds: float, now: float) -> None:
        """Do `seconds` of that work; `now`: the time at its end."""
        ...

    def reserve(self, request: SimulatedRequest) -> bool:
        """Reserve capacity for a request of a context instance; return whether there is enough."""
        ...

    def admit(self, request: SimulatedRequest) -> None:
        """Continue a request with a reservation."""
        ...

    def release(self, request: SimulatedRequest) -> None:
        """Free the capacity of a request that continues on another instance."""
        ...


class InstanceListener(Protocol):
    """Receiver of an instance's events."""

    def started(self, request: SimulatedRequest) -> None:
        """Note that a context has its memory, so it can be offered to a generation instance."""

    def computed(self, request: SimulatedRequest, now: float) -> None:
        """Note the first token."""

    def ended(self, request: SimulatedRequest, now: float) -> None:
        """Note the last token."""


class StepInstance:
    """An engine whose steps `Scheduler` plans and `StepTimes` times."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache_tokens: int,
        times: StepTimes,
        ranks: int,
        stages: int,
        hands_over: bool,
        listener: InstanceListener,
    ) -> None:
        self.ranks = ranks
        self._times = times
        self._depth = stages
        self._hands_off = hands_over
        self._listener = listener
        blocks = BlockAllocator(kv_cache_tokens // config.tokens_per_block)
        self._scheduler = Scheduler(config, blocks, stages)
        self._in_flight: deque[list[tuple[Sequence, bool]]] = deque()  # True: the sequence gets a token
        self._costs: deque[float] = deque()  # seconds of each step in flight
        self._sequences: dict[int, tuple[Sequence, SimulatedRequest]] = {}  # by the sequence's id
        self._ids: dict[int, int] = {}  # of sequences, by the identity of their request
        self._reserved: dict[int, list[int]] = {}  # blocks, by the identity of a request
        self._offered: set[int] = set()
        self._n_added = 0

    def add(self, request: SimulatedRequest) -> None:
        self._scheduler.add(self._sequence(request))

    def poll(self, now: float) -> None:
        while len(self._in_flight) < self._depth and (plan := self._scheduler.plan()):
            self._begin(plan)
        if self._hands_off:
            self._scheduler.start_ahead()
            for sequence in [s for s in self._scheduler.running if s.id not in self._offered]:
                self._offered.add(sequence.id)
                self._listener.started(self._sequences[sequence.id][1])

    def work(self) -> float | None:
        return self._costs[0] if self._costs else None

    def advance(self, seconds: float, now: float) -> None:
        self._costs[0] -= seconds
        if self._costs[0] > 1e-12:
            return
        self._costs.popleft()
        step = self._in_flight.popleft()
        for sequence, _ in step:
            sequence.in_flight = False
        for sequence, gets_token in step:
            if gets_token:
                self._append(sequence, now)

    def reserve(self, request: SimulatedRequest) -> bool:
        blocks = self._scheduler.reserve(request.n_prompt, request.n_prompt + request.max_output - 1)
        if blocks is None:
            return False
        self._reserved[id(request)] = blocks
        return True

    def admit(self, request: SimulatedRequest) -> None:
        sequence = self._sequence(request)
        sequence.output, sequence.n_cached = [0], request.n_prompt
        sequence.blocks = self._reserved.pop(id(request))
        self._scheduler.admit(sequence)

    def release(self, request: SimulatedRequest) -> None:
        if (blocks := self._reserved.pop(id(request), None)) is not None:
            self._scheduler.give_up(blocks, request.n_prompt + request.max_output - 1)
            return
        sequence, _ = self._sequences.pop(self._ids.pop(id(request)))
        self._scheduler.free(sequence)

    def _sequence(self, request: SimulatedRequest) -> Sequence:
        sequence = Sequence(
            id=self._n_added,
            prompt=[0] * request.n_prompt,
            max_output=request.max_output,
            min_output=0,
            sampling=SamplingParams(),
            hands_off=self._hands_off,
        )
        self._n_added += 1
        self._sequences[sequence.id] = sequence, request
        self._ids[id(request)] = sequence.id
        return sequence

    def _begin(self, plan: list[tuple[Sequence, int]]) -> None:
        contexts = context_tokens = context_pairs = generations = generation_pairs = 0
        step = []
        for sequence, n in plan:
            sequence.n_cached += n
            sequence.in_flight = True
            if sequence.n_cached - n < len(sequence.prompt):
                contexts += 1
                context_tokens += n
                context_pairs += n * (2 * sequence.n_cached - n + 1) // 2
            else:
                generations += 1
                generation_pairs += sequence.n_cached
            step.append((sequence, sequence.n_uncached == 0))
        contents = generations, contexts, context_tokens, context_pairs, generation_pairs
        alone = 1.0 if self._in_flight else self._times.alone
        self._in_flight.append(step)
        self._costs.append(alone * self._times.seconds(contents))

    def _append(self, sequence: Sequence, now: float) -> None:
        request = self._sequences[sequence.id][1]
        sequence.output.append(0)
        if len(sequence.output) == 1:
            self._listener.computed(request, now)
        ends = len(sequence.output) >= request.n_output
        if ends or sequence.hands_off:
            self._scheduler.drop(sequence)
        if ends and not sequence.hands_off:
            self._scheduler.free(sequence)
            del self._sequences[sequence.id], self._ids[id(request)]
            self._listener.ended(request, now)
