"""What few requests ask for and a row of a message can't say: logits, forbidden words, penalties.

A `Special` comes with its request to the core, in this process, and the engine leaves there what its answer
has besides tokens. Ordinary requests have none, and pay nothing. A sequence that has one waits for each token
before its next step, also where others don't (see `Steps.n_ahead`). Only for an instance of one stage. Its
other ranks only learn which rows and adapters a step has; the leader gathers their logits, and chooses from
those.

Penalties, and their order, are those of TensorRT-LLM's `penaltyKernels.cu`: the bias, then repetition,
presence and frequency, over the tokens of the prompt and of the answer so far.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpillm.engine.extras.beams import Beams
from mpillm.engine.extras.lora import Adapter
from mpillm.engine.tensors.staging import to_device

if TYPE_CHECKING:
    from collections.abc import Sequence as List


@dataclass(eq=False)
class Special:
    """What a request asks for, and what the engine adds to its answer."""

    bias: NDArray[np.float32] | None = None  # [vocab], added to the logits
    repetition_penalty: float = 1.0
    # In units of the logits before they are divided by a temperature.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bad_words: tuple[tuple[int, ...], ...] = ()  # their last token is forbidden behind the others
    adapter: Adapter | None = None
    beam_width: int = 1
    length_penalty: float = 0.0
    early_stopping: bool = True
    ends: tuple[int, ...] | None = None  # tokens that end a beam; None: the model's own
    beams: Beams | None = None  # the search, made by the engine
    not_yet: tuple[int, ...] = ()  # tokens that are forbidden before `Sequence.min_output`
    keeps_context_logits: bool = False
    keeps_generation_logits: bool = False
    # The model's own: of the prompt's tokens, in the pieces in which it was computed ([tokens, vocab]), and
    # those that each token of the answer was chosen from ([vocab]).
    context_logits: list[NDArray[np.float32]] = field(default_factory=list)
    generation_logits: list[NDArray[np.float32]] = field(default_factory=list)

    error: str = ""  # why the engine has refused it

    def refusal(self, vocab_size: int) -> str | None:
        """Return what can't be done, or None."""
        if self.bias is not None and len(self.bias) != vocab_size:
            return f"embedding_bias has {len(self.bias)} numbers, the vocabulary {vocab_size}"
        words = [token for word in self.bad_words for token in word]
        if words and not 0 <= min(words) <= max(words) < vocab_size:
            return f"bad_words_list has a token that is not in the vocabulary (0 to {vocab_size - 1})"
        return None

    def rows_to_keep(self, n_prompt: int, start: int, end: int) -> range:
        """Which of the tokens [start, end) of a sequence have context logits that are not there yet."""
        if not self.keeps_context_logits:
            return range(0)
        there = sum(map(len, self.context_logits))  # a preempted sequence computes its prompt again
        return range(max(start, there), min(end, n_prompt))

    def adjust(self, logits: Tensor, prompt: List[int], output: List[int], *, may_end: bool) -> None:
        """Change the logits of the next token in place: float32 [vocab]."""
        if self.bias is not None:
            logits += to_device(self.bias, logits.device)
        if self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty:
            counted = np.unique([*prompt, *output], return_counts=True)
            seen, counts = (to_device(numbers, logits.device) for numbers in counted)
            of_seen = logits[seen]
            penalty = self.repetition_penalty
            of_seen = torch.where(of_seen < 0, of_seen * penalty, of_seen / penalty)
            logits[seen] = of_seen - self.presence_penalty - self.frequency_penalty * counts
        for *before, last in self.bad_words:
            n = len(before)
            if not n or [*prompt[max(0, len(prompt) + len(output) - n) :], *output[-n:]][-n:] == before:
                logits[last].fill_(-torch.inf)
        if self.not_yet and not may_end:
            for token in self.not_yet:
                logits[token : token + 1].fill_(-torch.inf)  # it may be no token of the model
