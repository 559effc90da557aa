"""Optional features of a request that a message row does not carry: penalties, beams, LoRA, and more.

A `RequestExtras` object reaches the core with its request, in this process. The engine adds results other
than tokens to this object. Requests without extras have no extra cost. A sequence with extras waits for each
token before its next step (see `Steps.n_ahead`).

Extras require an instance of one pipeline stage. The instance's other ranks receive only `StepExtras`. The
root rank gathers all ranks' logits, and samples.

Penalties follow TensorRT-LLM's `penaltyKernels.cu`: bias, then repetition, presence and frequency, over the
prompt and the output so far.
"""

from __future__ import annotations

import copy
import functools
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpillm.engine.extras.beams import Beams
from mpillm.engine.extras.lora import Adapter
from mpillm.engine.extras.step_extras import StepExtras
from mpillm.engine.extras.token_counts import TokenCounts
from mpillm.engine.schedule.sequence import Sequence
from mpillm.engine.schedule.step import Span, Step
from mpillm.engine.shape.engine_config import SchedulerConfig
from mpillm.engine.shape.model_info import ModelInfo
from mpillm.engine.tensors.staging import to_device

if TYPE_CHECKING:
    from collections.abc import Sequence as List


@dataclass(eq=False)
class RequestExtras:
    """Optional features of a request, and their results. Implements `SequenceExtras`."""

    bias: NDArray[np.float32] | None = None  # [vocab], added to the logits
    repetition_penalty: float = 1.0
    # In units of the logits before they are divided by a temperature.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bad_words: tuple[tuple[int, ...], ...] = ()  # a word's last token is forbidden after its other tokens
    adapter: Adapter | None = None
    beam_width: int = 1
    length_penalty: float = 0.0
    early_stopping: bool = True
    ends: tuple[int, ...] | None = None  # tokens that end a beam; None: the model's own
    beams: Beams | None = None  # the search, made by `prepare`
    not_yet: tuple[int, ...] = ()  # tokens that are forbidden before `Sequence.min_output`
    keeps_context_logits: bool = False
    keeps_generation_logits: bool = False
    # Logits before any change: [tokens, vocab] for each computed piece of the prompt, and [vocab] for the
    # choice of each output token.
    context_logits: list[NDArray[np.float32]] = field(default_factory=list)
    generation_logits: list[NDArray[np.float32]] = field(default_factory=list)

    more_slots: list[int] = field(default_factory=list)  # of the beams after the first
    error: str = ""  # why the engine has refused the request

    _counts: TokenCounts | None = None  # of the prompt, and without beams of the first output tokens
    _n_counted: int = 0  # of these output tokens

    @property
    def n_slots(self) -> int:
        return self.beam_width

    @property
    def salt(self) -> bytes:
        """Return the salt of the request's blocks: the adapter's.

        With context logits, the salt is random: the model must compute the whole prompt, without cached
        blocks.
        """
        if self.keeps_context_logits:
            return secrets.token_bytes(16)
        return self.adapter.salt if self.adapter is not None else b""

    # --- the life of a sequence ---

    def refusal(self, sequence: Sequence, info: ModelInfo, config: SchedulerConfig) -> str | None:
        """Return the reason why the engine cannot serve the request, or None."""
        if self.beam_width > 1 and (why := self._beam_refusal(sequence, info, config)):
            return why
        if self.bias is not None and len(self.bias) != info.vocab_size:
            return f"embedding_bias has {len(self.bias)} numbers, the vocabulary {info.vocab_size}"
        tokens = [token for word in self.bad_words for token in word]
        if tokens and not 0 <= min(tokens) <= max(tokens) < info.vocab_size:
            return f"bad_words_list has a token that is not in the vocabulary (0 to {info.vocab_size - 1})"
        return None

    def _beam_refusal(self, sequence: Sequence, info: ModelInfo, config: SchedulerConfig) -> str | None:
        width, size = self.beam_width, config.tokens_per_block
        if info.window_cache_tokens:
            return f"beam_width {width}: not on a GPU where layers with a window have a KV cache of their own"
        n_needed, n_available = self.n_blocks(sequence, size) * size, info.kv_cache_tokens // size * size
        if n_needed > n_available:
            return f"beam_width {width} needs {n_needed} tokens of KV cache, of which there are {n_available}"
        if width > min(config.max_batch_size, config.max_num_tokens):
            return (
                f"beam_width {width} exceeds max_batch_size {config.max_batch_size}"
                f" or max_num_tokens {config.max_num_tokens}"
            )
        n_ends = len(set(info.end_ids if self.ends is None else self.ends))
        if Beams.candidates(width, n_ends) > info.vocab_size:
            return f"beam_width {width} is too large for a vocabulary of {info.vocab_size}"
        return None

    def prepare(self, sequence: Sequence, end_ids: set[int], tokens_per_block: int) -> None:
        """Begin a beam search. The search's end tokens are forbidden before `Sequence.min_output`."""
        if self.beam_width == 1:
            return
        ends = end_ids if self.ends is None else set(self.ends)
        self.not_yet += tuple(ends)
        self.beams = Beams(
            self.beam_width,
            sequence.max_output,
            ends,
            self.length_penalty,
            self.early_stopping,
            tokens_per_block,
        )

    def n_blocks(self, sequence: Sequence, tokens_per_block: int) -> int:
        """Return the number of blocks: the prompt's full blocks once, and the others for each beam."""
        n_shared = len(sequence.prompt) // tokens_per_block
        n_per_beam = -(-sequence.max_cached // tokens_per_block)
        return n_shared + self.beam_width * (n_per_beam - n_shared)

    def update_output(self, sequence: Sequence) -> bool:
        """Set the output to the best beam's. Called for each row of the search; repeated calls do nothing."""
        assert self.beams is not None
        sequence.output = self.beams.answers()[0].tokens
        return self.beams.is_done

    # --- a step ---

    def add_rows(self, step: Step, sequence: Sequence, n: int) -> None:
        """Add the sequence's next `n` tokens to a step, and its extra work to `Step.extras`."""
        start, n_tokens, n_sampled = sequence.n_cached, len(step.tokens), len(step.sampled)
        if self.beams is None:
            step.add(sequence, n, sequence.blocks)
        elif start < len(sequence.prompt):
            step.add(sequence, n, self.beams.first_table(sequence.blocks, len(sequence.prompt)))
        else:
            self._add_beams(self.beams, step, sequence)
        extras, rows = StepExtras.of(step), slice(n_tokens, len(step.tokens))
        if missing := self._missing_logits(len(sequence.prompt), start, start + n):
            shift = n_tokens - start
            part = slice(missing.start + shift, missing.stop + shift)
            extras.context_logits.append((self.context_logits, part))
        if self.adapter is not None:
            extras.adapters.append((self.adapter, rows))
        for beam, row in enumerate(range(n_sampled, len(step.sampled))):
            extras.adjusted.append((row, functools.partial(self._adjust, sequence, beam)))

    def _add_beams(self, beams: Beams, step: Step, sequence: Sequence) -> None:
        """Add a row for each running beam, with its own table of blocks."""
        n_cached, sequence.n_cached = sequence.n_cached, sequence.n_cached + 1
        tables = beams.tables(sequence.blocks, n_cached, StepExtras.of(step).copies)
        slots = sequence.slot, *self.more_slots
        for slot, beam, table in zip(slots, beams.running, tables, strict=False):
            step.spans.append(Span(slot, n_cached, 1, 0, table))
            step.logits_rows.append(len(step.tokens))
            step.tokens.append(beam.tokens[-1])
            step.sampled.append(sequence)
            step.places.append(sequence.n_output)

    def _missing_logits(self, n_prompt: int, start: int, end: int) -> range:
        """Return the tokens among [start, end) of a sequence that still lack their context logits."""
        if not self.keeps_context_logits:
            return range(0)
        n_done = sum(map(len, self.context_logits))  # a preempted sequence computes its prompt again
        return range(max(start, n_done), min(end, n_prompt))

    def _adjust(self, sequence: Sequence, beam: int, logits: Tensor) -> None:
        """Change the logits of the next token in place: float32 [vocab]."""
        output = sequence.output if self.beams is None else self.beams.running[beam].tokens
        if self.keeps_generation_logits:
            self.generation_logits.append(logits.to("cpu", copy=True).numpy())
        self._add_bias_and_penalties(logits, sequence.prompt, output)
        for *before, last in self.bad_words:
            if _ends_with(sequence.prompt, output, before):
                logits[last].fill_(-torch.inf)
        if len(output) < sequence.min_output:
            for token in self.not_yet:
                logits[token : token + 1].fill_(-torch.inf)  # an empty slice if the model lacks the token
        if self.beams is not None:
            self.beams.take(logits.log_softmax(-1))

    def _add_bias_and_penalties(self, logits: Tensor, prompt: List[int], output: List[int]) -> None:
        if self.bias is not None:
            logits += to_device(self.bias, logits.device)
        if self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty:
            counted = self._counts_of(prompt, output)
            seen, counts = (to_device(each, logits.device) for each in (counted.seen, counted.counts))
            of_seen, penalty = logits[seen], self.repetition_penalty
            of_seen = torch.where(of_seen < 0, of_seen * penalty, of_seen / penalty)
            logits[seen] = of_seen - self.presence_penalty - self.frequency_penalty * counts

    def _counts_of(self, prompt: List[int], output: List[int]) -> TokenCounts:
        if self._counts is None:
            self._counts = TokenCounts(prompt)
        if self.beams is not None:  # they continue each other's outputs
            of_beam = copy.copy(self._counts)
            of_beam.add(output)
            return of_beam
        self._counts.add(output[self._n_counted :])
        self._n_counted = len(output)
        return self._counts


def _ends_with(prompt: List[int], output: List[int], tokens: List[int]) -> bool:
    """Return whether the prompt and the output after it end with `tokens`."""
    n = len(tokens)
    return not n or [*prompt[max(0, len(prompt) + len(output) - n) :], *output[-n:]][-n:] == tokens
