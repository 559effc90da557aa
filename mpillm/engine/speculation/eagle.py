"""Drafts from a draft head (`eagle_head`, `mtp_head`), which reads the model's hidden states.

The head's row i is token i + 1 with the hidden state of token i. So the head is a draft model without the
first token of a sequence. Rows of draft tokens use the head's own hidden states. After verification, these
rows are computed again with the model's hidden states.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from mpillm.engine.model.decoder import Features
from mpillm.engine.model.eagle_head import EagleHead
from mpillm.engine.model.mtp_head import MtpHead
from mpillm.engine.run.worker import Worker
from mpillm.engine.schedule.block_allocator import NULL_BLOCK
from mpillm.engine.schedule.sequence import Sequence
from mpillm.engine.schedule.step import Step
from mpillm.engine.shape.engine_config import SchedulerConfig
from mpillm.engine.speculation.draft_model import DraftModel, DraftSequence
from mpillm.engine.tensors.graphs import ladder
from mpillm.engine.tensors.staging import last_of_each, to_device


class EagleDrafter(DraftModel):
    """Implements `speculation.Drafter`."""

    _N_UNSEEN = 1

    def __init__(
        self,
        worker: Worker,
        head: EagleHead | MtpHead,
        features: Features,
        config: SchedulerConfig,
        max_draft_len: int,
    ) -> None:
        """`worker` runs `head`; `features`: hidden states of the target model."""
        super().__init__(worker, config)
        self._few = 1 + max_draft_len  # tokens of a step after a fully accepted draft
        self._head = head
        self._features = features
        # Hidden states: the model's for each position in its KV cache, then, for each slot, the head's output
        # for the slot's last row.
        self._first_slot = (1 + worker.part.info.kv_cache_tokens // self._size) * self._size
        with torch.inference_mode():
            n_states = self._first_slot + config.max_batch_size
            self._states = head.hidden.new_zeros(n_states, head.hidden.shape[1])

    def warm_up(self) -> None:
        """Run every kind of step, and `fuse`, so that a test compiles nothing."""
        self._worker.warm_up(self._max_num_tokens)
        rows = self._features.rows
        with torch.inference_mode():
            for n in ladder(len(rows)):
                self._head.fuse(rows[:n])

    @torch.inference_mode()
    def computed(self, step: Step, sequences: Mapping[int, Sequence]) -> None:
        """Store the hidden states of a step. `sequences`: candidates for a draft, by slot."""
        if sequences:
            places = [self._places(sequences.get(s.slot), s.n_cached, s.n_new) for s in step.spans]
            on_device = to_device(np.concatenate(places), self._states.device)
            self._states.index_copy_(0, on_device, self._head.fuse(self._features.rows[: len(on_device)]))

    def _places(self, sequence: Sequence | None, start: int, n: int) -> NDArray[np.int64]:
        """Return the positions of a sequence's states [start, start + n).

        Without a sequence, they are in the null block.
        """
        if sequence is None:
            return np.full(n, NULL_BLOCK * self._size)
        at, first = np.arange(start, start + n), start // self._size
        blocks = np.array(sequence.blocks[first : (start + n - 1) // self._size + 1])
        places: NDArray[np.int64] = blocks[at // self._size - first] * self._size + at % self._size
        return places

    def _n_cached_drafts(self, state: DraftSequence, new: list[int]) -> int:
        return 0  # draft tokens are cached with the head's own hidden states

    @torch.inference_mode()
    def _give(self, pieces: list[tuple[DraftSequence, list[int]]]) -> None:
        read = np.concatenate([self._read_by(state, len(new)) for state, new in pieces])
        on_device = to_device(read, self._states.device)
        torch.index_select(self._states, 0, on_device, out=self._head.hidden[: len(on_device)])

    def _read_by(self, state: DraftSequence, n: int) -> NDArray[np.int64]:
        """Return the positions of the hidden states for a sequence's next `n` rows."""
        if state.n_cached < state.n_right:
            return self._places(state.sequence, state.n_cached, n)
        return np.array([self._first_slot + state.slot])  # after a draft token

    @torch.inference_mode()
    def _keep(self, rows: list[DraftSequence]) -> None:
        places = np.array([self._first_slot + state.slot for state in rows])
        on_device = to_device(last_of_each(places, NULL_BLOCK * self._size), self._states.device)
        self._states.index_copy_(0, on_device, self._head.hidden[: len(on_device)])
