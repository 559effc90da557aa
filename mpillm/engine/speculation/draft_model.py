"""Guess with a smaller model of the same vocabulary, as in Leviathan et al., 2023; its guesses are greedy.

The model is on the first rank of the instance alone, whatever the instance's layout, with a KV cache of its
own. So it computes each prompt, too, even one whose cache was handed over.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mpillm.engine.cache.kv_cache import BlockAllocator
from mpillm.engine.sequence import Sequence
from mpillm.engine.step import Span, Step
from mpillm.engine.worker import Worker

_FEW = 2  # tokens that the cache lacks after guesses that were all right


@dataclass(eq=False)
class _Drafting:
    """A sequence in the draft model's KV cache."""

    slot: int
    blocks: list[int] = field(default_factory=list)
    n_told: int = 0  # see `Span`
    cached: list[int] = field(default_factory=list)  # tokens, of which the last may be wrong guesses
    n_right: int = 0  # how many of those are surely the sequence's

    def lacks(self, context: list[int]) -> list[int]:
        """Forget the wrong guesses; return the tokens of `context` to compute next, at least the last."""
        n = self.n_right
        while n < min(len(self.cached), len(context) - 1) and self.cached[n] == context[n]:
            n += 1
        del self.cached[n:]
        self.n_right = len(context)
        return context[n:]


class DraftModel:
    """Implements `speculation.Drafter`."""

    def __init__(
        self, worker: Worker, tokens_per_block: int, max_batch_size: int, max_num_tokens: int
    ) -> None:
        """`worker`: of one rank, on a CPU; it computes at most `max_num_tokens` tokens in a step."""
        self._worker = worker
        self._size = tokens_per_block
        self._max_num_tokens = max_num_tokens
        info = worker.part.info
        self._max_seq_len = info.max_seq_len
        self._blocks = BlockAllocator(info.kv_cache_tokens // tokens_per_block)
        self._slots = list(range(max_batch_size))
        self._of: dict[Sequence, _Drafting] = {}

    def draft(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        for sequence in [sequence for sequence in self._of if sequence.is_done]:
            ended = self._of.pop(sequence)
            self._slots.append(ended.slot)
            self._blocks.give_back(ended.blocks)
        drafts: list[list[int]] = [[] for _ in wanted]
        work: list[tuple[_Drafting, list[int], list[int], int]] = []  # its next tokens, its draft, how long
        for (sequence, most), draft in zip(wanted, drafts, strict=True):
            context = sequence.prompt + sequence.output
            if (drafting := self._with_room(sequence, len(context) + most)) is not None:
                work.append((drafting, drafting.lacks(context), draft, most))
        while work:
            tokens = self._next_tokens([(drafting, new) for drafting, new, _, _ in work])
            for (_, _, draft, _), token in zip(work, tokens, strict=True):
                draft.append(token)
            work = [(d, draft[-1:], draft, most) for d, _, draft, most in work if len(draft) < most]
        return drafts

    def _with_room(self, sequence: Sequence, n: int) -> _Drafting | None:
        """Return its state, with blocks for all of `n` tokens but the last; None if there are not so many."""
        drafting = self._of.get(sequence)
        more = -(-(n - 1) // self._size) - (len(drafting.blocks) if drafting else 0)
        if n > self._max_seq_len or more > self._blocks.n_free or not (drafting or self._slots):
            return None
        if drafting is None:
            drafting = self._of[sequence] = _Drafting(self._slots.pop())
        drafting.blocks += self._blocks.take(max(0, more))
        return drafting

    def _next_tokens(self, work: list[tuple[_Drafting, list[int]]]) -> list[int]:
        """Add tokens to each, in as many steps as it takes; return the likeliest token after each's last."""
        tokens: dict[_Drafting, int] = {}
        pieces: list[tuple[_Drafting, list[int]]] = []
        left = most = self._max_num_tokens
        for drafting, new in work:
            for at in range(0, len(new), most):
                piece = new[at : at + most]
                if len(piece) > left:
                    tokens |= self._run(pieces)
                    pieces, left = [], most
                pieces.append((drafting, piece))
                left -= len(piece)
        tokens |= self._run(pieces)
        return [tokens[drafting] for drafting, _ in work]

    def _run(self, pieces: list[tuple[_Drafting, list[int]]]) -> dict[_Drafting, int]:
        """Run a step; return the likeliest token after each piece."""
        step = Step()
        pieces.sort(key=lambda piece: len(piece[1]) != 1)
        for drafting, new in pieces:
            n_told, drafting.n_told = drafting.n_told, len(drafting.blocks)
            blocks = drafting.blocks[n_told:]
            n, is_few = len(drafting.cached), 1 < len(new) <= _FEW
            step.spans.append(Span(drafting.slot, n, len(new), n_told, blocks, is_few))
            drafting.cached += new
            step.tokens += new
            step.wanted.append(len(step.tokens) - 1)
        sampled = self._worker.run(step)
        assert sampled is not None
        return {drafting: token for (drafting, _), token in zip(pieces, sampled.take(), strict=True)}
