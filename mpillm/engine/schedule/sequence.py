"""A request in progress, as the scheduler and the caches see it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from mpillm.engine.schedule.sampling_params import SamplingParams
from mpillm.engine.shape.engine_config import SchedulerConfig
from mpillm.engine.shape.model_info import ModelInfo

UNREAD = -1  # stands for a token that is still on the device


@dataclass(eq=False, slots=True)  # with a __dict__ of so many fields each access costs more
class Sequence:
    """A request in progress: its prompt and its output so far, with `n_cached` tokens in the KV cache."""

    id: int
    prompt: list[int]
    max_output: int
    min_output: int
    sampling: SamplingParams
    hands_off: bool = False  # stop after the first token and keep the blocks until they are released
    ignore_stop: bool = False  # stop words do not end its output
    ignore_end: bool = False  # end tokens do not end its output
    stream: bool = False  # its client gets each token immediately
    arrival: int = 0
    output: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    n_blocks_freed: int = 0  # of its first blocks: their tokens are outside all windows
    window_blocks: list[int] = field(default_factory=list)  # of layers with a window (see `WindowBlocks`)
    n_window_blocks_freed: int = 0
    n_window_blocks_sent: int = 0
    max_blocks: int = 0  # limit for its blocks, set at its start
    n_cached: int = 0
    # Draft tokens after `output`, which a step in flight verifies.
    draft: list[int] = field(default_factory=list)
    n_unread: int = 0  # tokens after `output` from steps in flight, not read by the host yet
    in_flight: bool = False  # in a step whose tokens must come back before its next step
    is_done: bool = False  # drop the tokens that steps in flight still bring
    slot: int = -1  # while it runs: its own number below max_batch_size
    n_blocks_sent: int = 0  # how many of its blocks steps have sent to the ranks, for its slot
    is_cancelled: bool = False
    n_passed_on: int = 0  # tokens of the answer that were streamed
    wants_logprobs: int = 0  # 0: none; 1 + k: of each token and of the k likeliest tokens
    logprobs: list[list[int]] = field(default_factory=list)  # not streamed yet; see `ResponseFlag.LOGPROBS`
    n_logprobs_sent: int = 0  # tokens of the answer whose log probabilities were streamed
    added_at: float = 0.0  # time.perf_counter()
    started_at: float = 0.0  # when it first got blocks, likewise
    times: bool = False  # the response contains the two times above
    n_reused: int = 0  # tokens of its prompt that were in the cache when its computation began
    wants_reused: bool = False  # the response contains this number
    hashes: list[bytes] = field(default_factory=list)  # of full blocks, if computed (see `PrefixCache`)
    n_published: int = 0  # how many of its blocks other sequences can find in the cache
    salt: bytes = b""  # sequences with different salts never share blocks
    extras: SequenceExtras | None = None

    @property
    def n_output(self) -> int:
        return len(self.output) + self.n_unread

    @property
    def n_context(self) -> int:
        return len(self.prompt) + len(self.output) + self.n_unread

    @property
    def n_uncached(self) -> int:
        return len(self.prompt) + len(self.output) + self.n_unread - self.n_cached

    @property
    def max_cached(self) -> int:
        """Tokens in the KV cache when its longest output ends: all but the last token."""
        return len(self.prompt) + (0 if self.hands_off else self.max_output - 1)

    def tokens(self, start: int, end: int) -> list[int]:
        """Return tokens [start, end) of prompt and output, with `UNREAD` for tokens still on the device."""
        n = len(self.prompt)
        if start >= n:
            known = self.output[start - n : end - n]
        else:
            known = self.prompt[start:end] + self.output[: max(0, end - n)]
        return known if len(known) == end - start else known + [UNREAD] * (end - start - len(known))


class SequenceExtras(Protocol):
    """Optional features of a request, as the scheduler and the engine see them (`engine.extras`).

    A sequence may take several slots, one for each continuation of its prompt. It then gets all its blocks
    when it starts, and is never preempted.
    """

    more_slots: list[int]  # besides `Sequence.slot`

    @property
    def n_slots(self) -> int: ...

    def refusal(self, sequence: Sequence, info: ModelInfo, config: SchedulerConfig) -> str | None:
        """Return why an engine can never serve the sequence, or None."""
        ...

    def prepare(self, sequence: Sequence, end_ids: set[int], tokens_per_block: int) -> None:
        """Make the extras ready for a sequence that the engine queues. `end_ids`: the model's."""
        ...

    def n_blocks(self, sequence: Sequence, tokens_per_block: int) -> int:
        """Return how many blocks a sequence with several slots needs."""
        ...

    def add_rows(self, step: Any, sequence: Sequence, n: int) -> None:
        """Add the sequence's next `n` tokens to a `Step` (for each slot), and its work to `Step.extras`."""
        ...

    def update_output(self, sequence: Sequence) -> bool:
        """Update the output of a sequence with several slots after a step; return whether it is final."""
        ...


class Progress(NamedTuple):
    """A sequence that got its first or last token in a step, or any token if it streams, or was cancelled."""

    sequence: Sequence
    is_first: bool
    is_final: bool
