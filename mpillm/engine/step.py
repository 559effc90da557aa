"""A step: what it holds, how the leader sends it in one message, and how a rank runs its part of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpillm.engine.cache.kv_cache import KV_DTYPES, KVCache
from mpillm.engine.handoff.transfer import Kind, Transfer, Transfers, pack_transfers, unpack_transfers
from mpillm.engine.model import ops
from mpillm.engine.model.attention import Span, StepAttention
from mpillm.engine.model.model_info import ModelInfo
from mpillm.engine.model.transformer import Llama, Ops
from mpillm.engine.parallel.groups import Groups, MpiGroups
from mpillm.engine.sampler import SamplingParams, sample
from mpillm.engine.sequence import Sequence
from mpillm.engine.staging import Sampled
from mpillm.engine.weights.parameters import Checkpoint, DummyWeights, Shards, Weights
from mpillm.engine.weights.shards import Built

_SAMPLING = np.dtype(
    [("temperature", "<f4"), ("top_k", "<i4"), ("top_p", "<f4"), ("seed", "<u4"), ("place", "<i4")]
)
_SPAN = 6  # numbers of a span in a message: slot, cached, new, blocks told before, blocks told now, wanted
_NOTHING, _TOKEN, _TOKEN_NOT_END = range(3)


@dataclass
class Step:
    """Tokens of some sequences, back to back in the order of `spans`; those with one new token first."""

    spans: list[Span] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)  # rows that a token is sampled from
    not_end: list[int] = field(default_factory=list)  # indices in `wanted` that must not get an end token
    sampling: list[SamplingParams] | None = None  # of each wanted row; None: all are greedy
    places: list[int] = field(default_factory=list)  # see `sample`
    transfers: list[Transfer] = field(default_factory=list)  # of the handoff; may be all that a step holds

    @staticmethod
    def of(plan: list[tuple[Sequence, int]]) -> tuple[Step, list[Sequence]]:
        """Return the scheduler's next step and the sequences that get a token.

        Their tokens count as cached.
        """
        step = Step()
        sampled: list[Sequence] = []
        for sequence, n in plan:
            start, sequence.n_cached = sequence.n_cached, sequence.n_cached + n
            step.spans.append(Span(start, n, sequence.blocks, sequence.slot))
            step.tokens += sequence.tokens(start, start + n)
            if sequence.n_uncached == 0:
                if sequence.n_output < sequence.min_output:
                    step.not_end.append(len(sampled))
                step.wanted.append(len(step.tokens) - 1)
                sampled.append(sequence)
        if not all(s.sampling.is_greedy for s in sampled):
            step.sampling = [s.sampling for s in sampled]
            step.places = [s.n_output for s in sampled]
        return step, sampled


def pack(step: Step, sequences: list[Sequence]) -> NDArray[np.int32]:
    """Return the step as a message, with only those blocks that no earlier message has named."""
    head, blocks = [len(step.tokens), step.sampling is not None], []
    wanted = dict.fromkeys(step.wanted, _TOKEN) | {step.wanted[i]: _TOKEN_NOT_END for i in step.not_end}
    last = -1
    for span, sequence in zip(step.spans, sequences, strict=True):
        last += span.n_new
        new = span.blocks[sequence.n_told :]
        head += (
            sequence.slot,
            span.n_cached,
            span.n_new,
            sequence.n_told,
            len(new),
            wanted.get(last, _NOTHING),
        )
        blocks += new
        sequence.n_told += len(new)
    rows = [
        (p.temperature, p.top_k, p.top_p, p.seed, place)
        for p, place in zip(step.sampling or (), step.places, strict=True)
    ]
    sampling = np.array(rows, _SAMPLING)
    numbers = [*pack_transfers(step.transfers), len(step.spans), *head, *blocks, *step.tokens]
    return np.concatenate([np.array(numbers, np.int32), sampling.view(np.int32)])


def unpack(message: NDArray[np.int32], tables: dict[int, list[int]]) -> Step:
    """Return what `pack` was given; `tables` keeps the blocks of each slot from message to message."""
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
        step.spans.append(Span(n_cached, n_new, tables[slot], slot))
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
    """This rank's part of the model and its memory, on a CPU; `gpu_worker` has the one on a GPU."""

    n_ahead = 0  # steps that may start before the tokens of the step before them are read

    def __init__(
        self,
        info: ModelInfo,
        tokens_per_block: int,
        groups: Groups,
        *,
        dummy: bool,
        device: str = "cpu",
        ops: Ops = ops,
    ) -> None:
        """Load the weights: minutes for a large model."""
        config, layout = info.config, groups.layout
        dtype = torch.float32 if info.dtype == "float32" else torch.bfloat16
        self.groups = groups
        self.peers = groups if isinstance(groups, MpiGroups) else None  # if this is one of several ranks
        self.transfers: Transfers | None = None  # if this rank sends or receives KV caches
        self._config = config
        self.dtype = dtype
        self._n_heads = layout.n_heads(config)
        mine = layout.vocabulary(config)
        self._forbidden = torch.tensor(
            [id_ - mine.start for id_ in info.end_ids if mine.start <= id_ < mine.stop], dtype=torch.int64
        )
        with torch.inference_mode():
            weights: Weights
            if info.engine is not None:
                weights = Built(info.engine, config, layout, device)
            else:
                source = (
                    DummyWeights(config, device)
                    if dummy or info.folder is None
                    else Checkpoint(info.folder, config)
                )
                weights = Shards(source, config, layout, dtype, device, info.quantization)
            self.model = Llama(config, weights, info.max_seq_len, groups, ops)
            kv_heads = layout.kv_heads(config)
            n_blocks = info.kv_cache_tokens // tokens_per_block
            n_layers = len(layout.layers(config))
            n_heads = kv_heads.stop - kv_heads.start
            scales = weights.kv_scales(layout.layers(config)) if info.kv_dtype == "fp8" else None
            kv_dtype = KV_DTYPES[info.kv_dtype]
            self.cache = KVCache(
                n_layers, n_blocks, n_heads, tokens_per_block, config.head_dim, kv_dtype, device, scales
            )

    @torch.inference_mode()
    def run(self, step: Step) -> Sampled | None:
        """Run a step: a token for each wanted row on the first rank of the last stage.

        None on the other ranks, and for a step without tokens.
        """
        layer_stored = None
        if step.transfers:
            assert self.transfers is not None
            self.transfers.start(step.transfers)
            if any(transfer.kind == Kind.SEND_LAYERS for transfer in step.transfers):
                layer_stored = self.transfers.layer_stored
            if not step.spans:
                return None
        layout = self.groups.layout
        x = self.forward(step, layer_stored)
        if not layout.is_last_stage:
            assert self.peers is not None
            self.peers.send_hidden(x)
            return None
        tokens = (
            self._sample(self.model.logits(x), step) if step.wanted else torch.empty(0, dtype=torch.int64)
        )
        return None if tokens is None or layout.tp_rank else Sampled(tokens)

    def warm_up(self, max_num_tokens: int) -> None:
        """Run what steps of up to `max_num_tokens` can run, so that nothing is compiled later. Collective."""

    def forward(self, step: Step, layer_stored: Callable[[int], None] | None = None) -> Tensor:
        """Return the wanted rows for `model.logits`, or all for the next stage; see `Llama.forward`."""
        attention = StepAttention(step.spans, self.cache, self._n_heads, self.model.rotations, self.dtype)
        x = (
            self.model.embed(torch.tensor(step.tokens))
            if self.groups.layout.is_first_stage
            else self._receive_hidden(len(step.tokens))
        )
        return self.model.forward(x, attention, torch.tensor(step.wanted, dtype=torch.int64), layer_stored)

    def _receive_hidden(self, n_rows: int) -> Tensor:
        assert self.peers is not None
        return self.peers.receive_hidden(n_rows, self._config.hidden_size, self.dtype, self.cache.keys.device)

    def _sample(self, logits: Tensor, step: Step) -> Tensor | None:
        """Return a token for each row, at least on the first rank of the TP group.

        `logits`: this rank's columns; may be changed.
        """
        groups, layout, logits = self.groups, self.groups.layout, logits.float()
        if step.not_end and len(self._forbidden):
            logits[torch.tensor(step.not_end)[:, None], self._forbidden] = -torch.inf
        if step.sampling is not None:
            whole = groups.gather(logits, layout.vocabulary_sizes(self._config))
            return None if whole is None else sample(whole, step.sampling, step.places)
        if layout.tp_size == 1:
            return logits.argmax(-1)
        return self._best_of_all(*logits.max(-1))

    def _best_of_all(self, best: Tensor, at: Tensor) -> Tensor | None:
        """Return each row's likeliest token, from each rank's likeliest, where `gather` returns the whole."""
        groups, layout = self.groups, self.groups.layout
        # float64 holds both exactly.
        mine = torch.stack([best.double(), (at + self.model.vocabulary.start).double()], dim=1)
        pairs = groups.gather(mine, [2] * layout.tp_size)
        if pairs is None:
            return None
        pairs = pairs.view(len(best), layout.tp_size, 2)
        return pairs[:, :, 1].gather(1, pairs[:, :, 0].argmax(1, keepdim=True))[:, 0].long()


class Follower:
    """A rank that does not lead: it runs the leader's steps in order, as soon as it has what they need."""

    def __init__(self, worker: Worker) -> None:
        assert worker.peers is not None
        self._worker = worker
        self._peers = worker.peers
        self._tables: dict[int, list[int]] = {}
        self._step: Step | None = None
        self._sampled: deque[Sampled] = deque()  # tokens that the leader waits for

    def has_work(self) -> bool:
        if self._sampled and self._sampled[0].ready():
            return True
        if self._step is None and (message := self._peers.take_plan()) is not None:
            self._step = unpack(message, self._tables)
        return self._step is not None and self._can_run()

    def run(self) -> None:
        """Do what `has_work` has found."""
        if self._step is not None and self._can_run():
            step, self._step = self._step, None
            if (sampled := self._worker.run(step)) is not None:
                self._sampled.append(sampled)
        while self._sampled and self._sampled[0].ready():
            self._peers.send_tokens(self._sampled.popleft().take())

    def poll_kv(self) -> None:
        """Tell the leader which transfers are done on this rank."""
        if self._worker.transfers is not None and (done := self._worker.transfers.poll()):
            self._peers.send_moved(done)

    def _can_run(self) -> bool:
        assert self._step is not None
        return self._peers.layout.is_first_stage or not self._step.spans or self._peers.has_hidden()
