"""Verification of drafts: a step computes a sequence's last token and the draft tokens after it.

The model chooses a token for each row. As long as the chosen token equals the draft token, the next row's
token is also correct. So the answer equals, token for token, the answer without speculation. This is also
true for sampling, because a sampled token depends only on its logits, its request's seed and its position.

Keys and values of rejected draft tokens stay in the sequence's own blocks until its next tokens overwrite
them. Other sequences can find a block only after the host has all of its tokens (`PrefixCache.publish`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from mpillm.engine.schedule.scheduler import Scheduler
from mpillm.engine.schedule.sequence import Sequence
from mpillm.engine.schedule.step import Step
from mpillm.engine.speculation.fixed_acceptance import FixedAcceptance


class Drafter(Protocol):
    """Source of draft tokens: `NGramDrafter`, `DraftModel`, `EagleDrafter`."""

    def draft(self, requests: list[tuple[Sequence, int]]) -> list[list[int]]:
        """Return draft tokens for each sequence, up to the given number, or none."""
        ...


class Speculation:
    """Adds draft tokens to steps, and verifies them."""

    def __init__(
        self,
        drafter: Drafter,
        scheduler: Scheduler,
        max_num_tokens: int,
        max_draft_len: int,
        max_concurrency: int | None = None,
        watch: Callable[[Step, Mapping[int, Sequence]], None] | None = None,
        fixed: FixedAcceptance | None = None,
    ) -> None:
        """
        Args:
            max_num_tokens: Limit of a step.
            max_draft_len: See `SpeculativeConfig`.
            max_concurrency: See `SpeculativeConfig`.
            watch: Receives each computed step (see `computed`).
            fixed: Decides which draft tokens are right, instead of the model.
        """
        self._drafter = drafter
        self._scheduler = scheduler
        self._max_num_tokens = max_num_tokens
        self._max_draft_len = max_draft_len
        self._max_concurrency = max_concurrency
        self._watch = watch
        self._fixed = fixed
        self.drafted_tokens = self.accepted_tokens = 0
        self.verifications = 0  # steps of a sequence with draft tokens
        self.accepted_at = [0] * max_draft_len  # accepted tokens by their position in the draft
        self._has_drafted = False  # the last step has draft tokens

    def waits(self) -> bool:
        """Return whether the next step needs the last step's tokens, because either may have draft tokens."""
        return self._has_drafted or not self._is_crowded()

    def add_drafts(self, plan: list[tuple[Sequence, int]]) -> list[tuple[Sequence, int]]:
        """Add draft tokens to the scheduler's plan, within the step's free tokens and the free blocks."""
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
        for (sequence, n), draft in zip(requests, self._drafter.draft(requests), strict=True):
            if self._fixed is not None:
                draft = self._fixed.completed(sequence, draft, n)
            sequence.draft = draft[: self._scheduler.take_ahead(sequence, len(draft))]
        self._has_drafted = any(sequence.draft for sequence, _ in requests)
        with_drafts = ((s, n + len(s.draft)) for s, n in plan)
        return sorted(with_drafts, key=lambda entry: entry[1] != 1 + len(entry[0].draft))

    def computed(self, step: Step, plan: list[tuple[Sequence, int]]) -> None:
        """Pass a computed step, with its sequences by slot, to `watch`."""
        if self._watch is not None:
            self._watch(step, {s.slot: s for s, _ in plan if s.extras is None})

    def accepted(
        self, rows: Iterable[tuple[Sequence, int]], numbers: list[int]
    ) -> Iterator[tuple[Sequence, int]]:
        """Yield each accepted token of a step: its sequence, and its index in `numbers`.

        The caller appends each token before it takes the next. With `fixed`, accepted draft tokens replace
        the model's tokens in `numbers`, because the KV cache has keys and values of the draft tokens.
        """
        rows = iter(rows)
        for sequence, at in rows:
            draft, sequence.draft = sequence.draft, []
            places = [at, *(at for _, at in itertools.islice(rows, len(draft)))]
            n = self._n_accepted(sequence, draft, places, numbers)
            sequence.n_cached -= len(draft) - n
            if not sequence.is_cancelled:
                self.drafted_tokens += len(draft)
                self.verifications += bool(draft)
            for i, place in enumerate(places[: n + 1]):
                if i < n and not (sequence.is_done or sequence.is_cancelled):
                    self.accepted_tokens += 1
                    self.accepted_at[i] += 1
                yield sequence, place

    def _n_accepted(self, sequence: Sequence, draft: list[int], places: list[int], numbers: list[int]) -> int:
        if self._fixed is not None:
            n = self._fixed.n_accepted(sequence, len(draft))
            for place, token in zip(places, draft[:n], strict=False):
                numbers[place] = token
            return n
        n = 0
        while n < len(draft) and draft[n] == numbers[places[n]]:
            n += 1
        return n

    def _is_crowded(self) -> bool:
        return self._max_concurrency is not None and len(self._scheduler.running) > self._max_concurrency
