"""A step: what it holds, how the leader tells the others in one message, and how a rank runs its part of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpillm.engine.attention import Span, StepAttention
from mpillm.engine.kv_cache import KVCache
from mpillm.engine.model import Llama
from mpillm.engine.model_config import ModelInfo
from mpillm.engine.parallel import Groups
from mpillm.engine.sampler import SamplingParams, sample
from mpillm.engine.scheduler import Sequence
from mpillm.engine.transfer import Kind, Transfer, Transfers, pack_transfers, unpack_transfers
from mpillm.engine.weights import Checkpoint, DummyWeights

_SAMPLING = np.dtype([("temperature", "<f4"), ("top_k", "<i4"), ("top_p", "<f4"), ("seed", "<u4"), ("place", "<i4")])
_SPAN = 6  # numbers of a span in a message: slot, cached, new, blocks already told, blocks told now, what is wanted
_NOTHING, _TOKEN, _TOKEN_NOT_END = range(3)


@dataclass
class Step:
    """Tokens of some sequences, back to back in the order of `spans`; those with one new token first."""

    spans: list[Span] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)  # rows that a token is sampled from
    not_end: list[int] = field(default_factory=list)  # which of the wanted (by index) may not be an end token
    sampling: list[SamplingParams] | None = None  # of each wanted row; None: all are greedy
    places: list[int] = field(default_factory=list)  # see `sample`
    transfers: list[Transfer] = field(default_factory=list)  # of the handoff; a step may hold nothing else

    @staticmethod
    def of(plan: list[tuple[Sequence, int]]) -> tuple[Step, list[Sequence]]:
        """The scheduler's next step, and the sequences that get a token; their tokens count as cached from now on."""
        step = Step()
        sampled: list[Sequence] = []
        for sequence, n in plan:
            start, sequence.n_cached = sequence.n_cached, sequence.n_cached + n
            step.spans.append(Span(start, n, sequence.blocks))
            step.tokens += sequence.tokens(start, start + n)
            if sequence.n_uncached == 0:
                if len(sequence.output) < sequence.min_output:
                    step.not_end.append(len(sampled))
                step.wanted.append(len(step.tokens) - 1)
                sampled.append(sequence)
        if not all(s.sampling.is_greedy for s in sampled):
            step.sampling = [s.sampling for s in sampled]
            step.places = [len(s.output) for s in sampled]
        return step, sampled


def pack(step: Step, sequences: list[Sequence]) -> NDArray[np.int32]:
    """The step as a message: of each sequence's blocks only those that no message before has named."""
    head, blocks = [len(step.tokens), step.sampling is not None], []
    wanted = dict.fromkeys(step.wanted, _TOKEN) | {step.wanted[i]: _TOKEN_NOT_END for i in step.not_end}
    last = -1
    for span, sequence in zip(step.spans, sequences, strict=True):
        last += span.n_new
        new = span.blocks[sequence.n_told :]
        head += (sequence.slot, span.n_cached, span.n_new, sequence.n_told, len(new), wanted.get(last, _NOTHING))
        blocks += new
        sequence.n_told += len(new)
    rows = [(p.temperature, p.top_k, p.top_p, p.seed, place) for p, place in zip(step.sampling or (), step.places, strict=True)]
    sampling = np.array(rows, _SAMPLING)
    numbers = [*pack_transfers(step.transfers), len(step.spans), *head, *blocks, *step.tokens]
    return np.concatenate([np.array(numbers, np.int32), sampling.view(np.int32)])


def unpack(message: NDArray[np.int32], tables: dict[int, list[int]]) -> Step:
    """What `pack` was given; `tables` holds the blocks of each slot from one message to the next."""
    step = Step()
    step.transfers, message = unpack_transfers(message)
    n_spans, n_tokens, is_sampled = message[:3].tolist()
    at = 3 + n_spans * _SPAN
    last = -1
    for slot, n_cached, n_new, n_told, n_blocks, wants in message[3:at].reshape(n_spans, _SPAN).tolist():
        if n_told == 0:
            tables[slot] = []
        tables[slot] += message[at : at + n_blocks].tolist()
        at += n_blocks
        step.spans.append(Span(n_cached, n_new, tables[slot]))
        last += n_new
        if wants == _TOKEN_NOT_END:
            step.not_end.append(len(step.wanted))
        if wants != _NOTHING:
            step.wanted.append(last)
    step.tokens = message[at : at + n_tokens].tolist()
    if is_sampled:
        rows = message[at + n_tokens :].view(_SAMPLING).tolist()
        step.sampling = [SamplingParams(*row[:4]) for row in rows]
        step.places = [row[4] for row in rows]
    return step


class Worker:
    """This rank's part of the model, and its memory."""

    def __init__(self, info: ModelInfo, tokens_per_block: int, groups: Groups, *, dummy: bool) -> None:
        """Loads the weights: minutes for a large model."""
        config, layout = info.config, groups.layout
        dtype = torch.float32 if info.dtype == "float32" else torch.bfloat16
        source = DummyWeights(config) if dummy or info.folder is None else Checkpoint(info.folder, config)
        self.groups = groups
        self.transfers: Transfers | None = None  # of a rank that hands over, or takes over
        self._config = config
        self._dtype = dtype
        self._n_heads = layout.n_heads(config)
        self._end_ids = list(info.end_ids)
        with torch.inference_mode():
            self.model = Llama(config, source, dtype, info.max_seq_len, groups)
            kv_heads = layout.kv_heads(config)
            n_blocks = info.kv_cache_tokens // tokens_per_block
            n_layers = len(layout.layers(config))
            self.cache = KVCache(n_layers, n_blocks, kv_heads.stop - kv_heads.start, tokens_per_block, config.head_dim, dtype)

    @torch.inference_mode()
    def run(self, step: Step) -> list[int] | None:
        """A token for each wanted row on the rank that samples; None on the others, and for a step without tokens."""
        groups, layout = self.groups, self.groups.layout
        layer_stored = None
        if step.transfers:
            assert self.transfers is not None
            self.transfers.start(step.transfers)
            if any(transfer.kind == Kind.SEND_LAYERS for transfer in step.transfers):
                layer_stored = self.transfers.layer_stored
            if not step.spans:
                return None
        attention = StepAttention(step.spans, self.cache, self._n_heads)
        if layout.is_first_stage:
            x = self.model.embed(torch.tensor(step.tokens))
        else:
            x = groups.receive_hidden(self._config.hidden_size, self._dtype)
        x = self.model.forward(x, attention, torch.tensor(step.wanted, dtype=torch.int64), layer_stored)
        if not layout.is_last_stage:
            groups.send_hidden(x)
            return None
        return self._sample(x, step) if step.wanted else [] if layout.tp_rank == 0 else None

    def _sample(self, logits: Tensor, step: Step) -> list[int] | None:
        """From this rank's columns of the logits."""
        groups, layout = self.groups, self.groups.layout
        mine = layout.vocabulary(self._config)
        forbidden = [id_ - mine.start for id_ in self._end_ids if mine.start <= id_ < mine.stop]
        if step.not_end and forbidden:
            logits[torch.tensor(step.not_end)[:, None], torch.tensor(forbidden)] = -torch.inf
        if step.sampling is not None:
            whole = groups.gather(logits, layout.vocabulary_sizes(self._config))
            return None if whole is None else sample(whole, step.sampling, step.places)
        if layout.tp_size == 1:
            greedy: list[int] = logits.argmax(-1).tolist()
            return greedy
        # Each rank's best and where it is: float64 holds both exactly.
        best, at = logits.max(-1)
        pairs = groups.gather(torch.stack([best.double(), (at + mine.start).double()], dim=1), [2] * layout.tp_size)
        if pairs is None:
            return None
        pairs = pairs.view(len(logits), layout.tp_size, 2)
        chosen: list[int] = pairs[:, :, 1].gather(1, pairs[:, :, 0].argmax(1, keepdim=True))[:, 0].long().tolist()
        return chosen


class Follower:
    """A rank that does not lead: it runs the leader's steps, in their order, as soon as it has what they need."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._groups = worker.groups
        self._tables: dict[int, list[int]] = {}
        self._step: Step | None = None

    def has_work(self) -> bool:
        if self._step is None and (message := self._groups.take_plan()) is not None:
            self._step = unpack(message, self._tables)
        if self._step is None:
            return False
        return self._groups.layout.is_first_stage or not self._step.spans or self._groups.has_hidden()

    def run(self) -> None:
        """What `has_work` has found."""
        assert self._step is not None
        step, self._step = self._step, None
        tokens = self._worker.run(step)
        if tokens is not None:
            self._groups.send_tokens(tokens)

    def poll_kv(self) -> None:
        """Tell the leader which transfers are done on this rank."""
        if self._worker.transfers is not None and (done := self._worker.transfers.poll()):
            self._groups.send_moved(done)
