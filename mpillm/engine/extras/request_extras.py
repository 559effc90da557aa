"""Optional features of a request that a message row does not carry: logits, forbidden words, penalties.

A `RequestExtras` object reaches the core with its request, in this process. The engine adds the results that
are not tokens. Requests without extras have no extra cost. A sequence with extras waits for each token before
its next step (see `Steps.n_ahead`).

Extras require an instance of one pipeline stage. The other ranks receive only the rows and adapters of a
step. The root rank gathers their logits and samples.

The penalties and their order are those of TensorRT-LLM's `penaltyKernels.cu`: bias, then repetition,
presence and frequency, over the prompt and the output so far.
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
class RequestExtras:
    """Optional features of a request, and their results."""

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
        """Return the reason why the engine cannot serve the request, or None."""
        if self.bias is not None and len(self.bias) != vocab_size:
            return f"embedding_bias has {len(self.bias)} numbers, the vocabulary {vocab_size}"
        words = [token for word in self.bad_words for token in word]
        if words and not 0 <= min(words) <= max(words) < vocab_size:
            return f"bad_words_list has a token that is not in the vocabulary (0 to {vocab_size - 1})"
        return None

    def rows_to_keep(self, n_prompt: int, start: int, end: int) -> range:
        """Return which of the tokens [start, end) of a sequence still lack their context logits."""
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
