"""Test guesses: a step computes a sequence's last token and the guesses after it, and keeps what is right.

Each row gets the token that the model chooses there. As long as that is the guess, the next row's token is
right, too, so the answer is the one without guesses, token for token, whether the choice is greedy or
sampled: a sampled token depends on its logits, its request's seed and its place only. Keys and values of
wrong guesses stay in the sequence's own blocks until its next tokens overwrite them; other sequences can find
a block only once the host knows all of its tokens (`PrefixCache.publish`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from mpillm.engine.schedule.scheduler import Scheduler
from mpillm.engine.schedule.sequence import Sequence
from mpillm.engine.schedule.step import Step


class Drafter(Protocol):
    """What guesses: `NGramDrafter`, `DraftModel`."""

    def draft(self, requests: list[tuple[Sequence, int]]) -> list[list[int]]:
        """Return guesses for what follows each sequence: up to that many tokens, or none."""
        ...


class Speculation:
    """Adds guesses to steps, and takes what the model makes of them."""

    def __init__(
        self,
        drafter: Drafter,
        scheduler: Scheduler,
        max_num_tokens: int,
        max_draft_len: int,
        max_concurrency: int | None = None,
        watch: Callable[[Step, Mapping[int, Sequence]], None] | None = None,
    ) -> None:
        """`max_num_tokens`: of a step; `watch`: see `computed`; the rest as `SpeculativeConfig`."""
        self._drafter = drafter
        self._scheduler = scheduler
        self._max_num_tokens = max_num_tokens
        self._max_draft_len = max_draft_len
        self._max_concurrency = max_concurrency
        self._watch = watch
        self.drafted_tokens = self.accepted_tokens = 0
        self._has_drafted = False  # the last step has guesses

    def waits(self) -> bool:
        """Return whether the next step needs the last one's tokens: it guesses, or that one has guesses."""
        return self._has_drafted or not self._is_crowded()

    def add_drafts(self, plan: list[tuple[Sequence, int]]) -> list[tuple[Sequence, int]]:
        """Return the scheduler's plan with guesses, in as many tokens and blocks as it leaves free."""
        self._has_drafted = False
        if self._is_crowded():
            return plan
        chosen = [
            s for s, n in plan if n == s.n_uncached == 1 and s.output and not s.n_unread and s.extras is None
        ]
        n_planned = sum(n if s.extras is None or n > 1 else s.extras.n_slots for s, n in plan)
        share = (self._max_num_tokens - n_planned) // max(1, len(chosen))
        longest = min(share, self._max_draft_len)
        requests = [
            (s, max_tokens)
            for s in chosen
            if (max_tokens := min(longest, s.max_output - len(s.output) - 1)) > 0
        ]
        if not requests:
            return plan
        for (sequence, _), draft in zip(requests, self._drafter.draft(requests), strict=True):
            sequence.draft = draft[: self._scheduler.take_ahead(sequence, len(draft))]
        self._has_drafted = any(sequence.draft for sequence, _ in requests)
        with_drafts = ((s, n + len(s.draft)) for s, n in plan)
        return sorted(with_drafts, key=lambda entry: entry[1] != 1 + len(entry[0].draft))

    def computed(self, step: Step, plan: list[tuple[Sequence, int]]) -> None:
        """Tell a drafter that wants to know it of a step that has run, with its sequences by slot."""
        if self._watch is not None:
            self._watch(step, {s.slot: s for s, _ in plan if s.extras is None})

    def accepted(
        self, rows: Iterable[tuple[Sequence, int]], numbers: list[int]
    ) -> Iterator[tuple[Sequence, int]]:
        """Yield those of a step's rows whose token counts: its sequence, and where in `numbers` the token is.

        The caller appends each token before it takes the next.
        """
        rows = iter(rows)
        for sequence, at in rows:
            draft, sequence.draft = sequence.draft, []
            places = [at, *(at for _, at in itertools.islice(rows, len(draft)))]
            n = 0
            while n < len(draft) and draft[n] == numbers[places[n]]:
                n += 1
            sequence.n_cached -= len(draft) - n
            if not sequence.is_cancelled:
                self.drafted_tokens += len(draft)
            for i, place in enumerate(places[: n + 1]):
                self.accepted_tokens += i < n and not (sequence.is_done or sequence.is_cancelled)
                yield sequence, place

    def _is_crowded(self) -> bool:
        return self._max_concurrency is not None and len(self._scheduler.running) > self._max_concurrency
