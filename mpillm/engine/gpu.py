"""A rank's part of the model on a GPU: the same model, with `kernels` between its products, and nothing that makes the host wait.

A step's only way back to the host is its tokens, and they are read while the next step runs: a new token stays on the device, by its
sequence's slot, and a row whose token the host does not know yet (`UNREAD`) takes it from there. Block tables lie on the device, too; the
host sends what it has changed. A step in which every sequence adds one token (decode) is a CUDA graph, captured at load for each size of a
ladder; a step of fewer rows is filled up with rows of a slot of nobody's, whose block is `NULL_BLOCK`. Other steps are launched one kernel
after the other: they are long enough to hide it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpillm.engine.attention import Span
from mpillm.engine.device import to_device
from mpillm.engine.kv_cache import KVCache
from mpillm.engine.model_config import ModelInfo
from mpillm.engine.parallel import Groups
from mpillm.engine.sampler import sample
from mpillm.engine.step import Step, Worker


class PagedAttention:
    """Of one step: see `model.Attention`. The first `n_decode` rows are sequences that add one token, `tiles` the contexts."""

    def __init__(
        self,
        kernels: Any,
        cache: KVCache,
        n_heads: int,
        rotations: Tensor,
        table: Tensor,
        slots: Tensor,
        positions: Tensor,
        n_decode: int,
        tiles: Tensor | None,
    ) -> None:
        """As the arguments of `kernels`."""
        self._kernels = kernels
        self._cache = cache
        self._n_heads = n_heads
        self._rotations = rotations
        self._table = table
        self._slots = slots
        self._positions = positions
        self._n_decode = n_decode
        self._tiles = tiles

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        keys, values, n = self._cache.keys[layer], self._cache.values[layer], self._n_decode
        self._kernels.rotate_store(qkv, keys, values, self._rotations, self._table, self._slots, self._positions, self._n_heads)
        out = qkv.new_empty(len(qkv), self._n_heads * qkv.shape[2])
        if n:
            rows = self._table, self._slots[:n], self._positions[:n]
            self._kernels.decode_attention(qkv[:n], keys, values, *rows, out[:n], self._n_heads)
        if self._tiles is not None:
            self._kernels.context_attention(qkv, keys, values, self._table, self._tiles, out, self._n_heads)
        return out


def ladder(max_batch_size: int) -> list[int]:
    """Sizes of decode that are captured: doubling while a product costs what reading its weights costs, then four to the doubling."""
    sizes, size = [], 1
    while size < max_batch_size:
        sizes.append(size)
        size += size if size < 64 else (1 << size.bit_length() - 1) // 4
    return [*sizes, max_batch_size]


class GpuWorker(Worker):
    """On `device`; a CPU with plain `kernels` does as well, slowly, without graphs."""

    def __init__(
        self, info: ModelInfo, tokens_per_block: int, groups: Groups, max_batch_size: int, *, dummy: bool, device: str, kernels: Any = None
    ) -> None:
        """Loads the weights and captures the graphs: seconds, and minutes for a large model."""
        self.device = torch.device(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._kernels = kernels or importlib.import_module("mpillm.engine.kernels")
        super().__init__(info, tokens_per_block, groups, dummy=dummy, device=device, ops=self._kernels)
        # A token is fed to its sequence's next step here, on every rank of the TP group; with stages, it would be needed on another one.
        self.n_ahead = 1 if groups.layout.pp_size == 1 else 0
        self._tokens_per_block = tokens_per_block
        self._nobody = max_batch_size  # the slot of rows that fill up a graph
        with torch.inference_mode():
            self._rotations = torch.view_as_real(self.model.rotations).flatten(1).contiguous()
            n_per_slot = -(-info.max_seq_len // tokens_per_block)
            self._table = torch.zeros(max_batch_size + 1, n_per_slot, dtype=torch.int32, device=self.device)
            self._last = torch.zeros(max_batch_size + 1, dtype=torch.int64, device=self.device)
            self._rows = torch.zeros(3 * max_batch_size, dtype=torch.int64, device=self.device)  # tokens, slots, positions
            self._hidden = torch.zeros(max_batch_size, self._config.hidden_size, dtype=self._dtype, device=self.device)
            self._forbidden = self._forbidden.to(self.device)
        self._told: dict[int, tuple[list[int], int]] = {}  # of each slot: its sequence's blocks, and how many of them `table` has
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        # Products of a mixture's quantised weights look at the router's choice on the host.
        if self.device.type == "cuda" and (info.quantization == "none" or not self._config.n_experts):
            self._capture(ladder(max_batch_size))

    # --- a step ---

    def forward(self, step: Step, layer_stored: Callable[[int], None] | None = None) -> Tensor:
        self._tell_blocks(step.spans)
        slots = [span.slot for span in step.spans]
        if layer_stored is None and len(step.tokens) == len(step.spans) == len(step.wanted):
            x, self._slots_wanted = self._decode(step, slots)
        else:
            x, self._slots_wanted = self._mixed(step, slots, layer_stored)
        return x

    def _sample(self, logits: Tensor, step: Step) -> Tensor:
        """As of any worker, but on every rank of the TP group: each feeds its own next step."""
        tokens = self._pick(logits, step)
        self._last.index_copy_(0, self._slots_wanted, tokens)
        return tokens

    def _decode(self, step: Step, slots: list[int]) -> tuple[Tensor, Tensor]:
        """Every sequence adds a token and gets one: this stage's output, and the slots."""
        n = len(slots)
        size = next((size for size in self._graphs if size >= n), n)
        rows = np.zeros((3, size), np.int64)
        rows[1] = self._nobody
        rows[:, :n] = step.tokens, slots, [span.n_cached for span in step.spans]
        self._rows[: 3 * size].copy_(to_device(rows.reshape(-1), self.device))
        if not self.groups.layout.is_first_stage:
            self._hidden[:n] = self._receive_hidden(n)
        if size in self._graphs:
            graph, out = self._graphs[size]
            graph.replay()
        else:
            out = self._forward_decode(size)
        return out[:n], self._rows[size : size + n]

    def _forward_decode(self, size: int) -> Tensor:
        """From what lies in the buffers."""
        tokens, slots, positions = self._rows[: 3 * size].view(3, size)
        x = self._embed(tokens, slots) if self.groups.layout.is_first_stage else self._hidden[:size]
        return self.model.forward(x, self._attention(slots, positions, size, None), None)

    def _mixed(self, step: Step, slots: list[int], layer_stored: Callable[[int], None] | None) -> tuple[Tensor, Tensor]:
        """Some sequences add several tokens: this stage's output (on the last stage of the wanted rows), and the slots of those wanted."""
        n, counts = len(step.tokens), np.array([span.n_new for span in step.spans])
        starts = np.cumsum(counts) - counts
        n_decode = int((counts == 1).sum())
        positions = np.arange(n) + np.repeat(np.array([span.n_cached for span in step.spans]) - starts, counts)
        row_slots = np.repeat(slots, counts)
        tiles = self._tiles(step.spans[n_decode:], starts[n_decode:])
        wanted = np.array(step.wanted, np.int64)
        parts = [np.array(step.tokens), row_slots, positions, wanted, row_slots[wanted], tiles.reshape(-1)]
        at = np.cumsum([len(part) for part in parts])[:-1].tolist()
        inputs = to_device(np.concatenate(parts), self.device).tensor_split(at)
        tokens, slots_there, positions_there, wanted_there, slots_wanted, tiles_there = inputs
        x = self._embed(tokens, slots_there) if self.groups.layout.is_first_stage else self._receive_hidden(n)
        attention = self._attention(slots_there, positions_there, n_decode, tiles_there.view(-1, 4) if len(tiles) else None)
        return self.model.forward(x, attention, wanted_there, layer_stored), slots_wanted

    def _tiles(self, spans: list[Span], starts: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """See `kernels.context_attention`; long ones first."""
        size = self._kernels.context_tile(self._n_heads, self.cache.keys.shape[2], self._dtype)
        tiles = [
            (start + at, min(size, span.n_new - at), span.n_cached + at, span.slot)
            for span, start in zip(spans, starts.tolist(), strict=True)
            for at in range(0, span.n_new, size)
        ]
        return np.array(sorted(tiles, key=lambda tile: -tile[2]), np.int64).reshape(-1, 4)

    def _embed(self, tokens: Tensor, slots: Tensor) -> Tensor:
        x: Tensor = self._kernels.embed(self.model.embedding, tokens, slots, self._last, self.model.vocabulary.start)
        return self.groups.all_reduce(x)

    def _attention(self, slots: Tensor, positions: Tensor, n_decode: int, tiles: Tensor | None) -> PagedAttention:
        return PagedAttention(self._kernels, self.cache, self._n_heads, self._rotations, self._table, slots, positions, n_decode, tiles)

    def _tell_blocks(self, spans: list[Span]) -> None:
        """Bring the tables up to date. A sequence's list of blocks only grows; another list is another sequence, or a new start."""
        at: list[int] = []
        blocks: list[int] = []
        width = self._table.shape[1]
        for span in spans:
            known, n = self._told.get(span.slot, (None, 0))
            if known is not span.blocks:
                n = 0
            elif n == len(known):
                continue
            at += range(span.slot * width + n, span.slot * width + len(span.blocks))
            blocks += span.blocks[n:]
            self._told[span.slot] = span.blocks, len(span.blocks)
        if at:
            places, values = to_device(np.array([at, blocks]), self.device)
            self._table.view(-1).index_copy_(0, places, values.to(torch.int32))

    def _pick(self, logits: Tensor, step: Step) -> Tensor:
        """int64, the same on every rank of the TP group."""
        groups, layout = self.groups, self.groups.layout
        if step.not_end and len(self._forbidden):
            rows = to_device(step.not_end, self.device)
            logits[rows[:, None], self._forbidden] = -torch.inf
        if step.sampling is not None:
            whole = groups.gather(logits.float(), layout.vocabulary_sizes(self._config))
            assert whole is not None  # NCCL gathers everywhere
            # Sums on a GPU may differ in their last bits from one rank to another; what is chosen must not.
            return groups.broadcast(sample(whole, step.sampling, step.places))
        if layout.tp_size == 1:
            return logits.argmax(-1)
        tokens = self._best_of_all(*logits.max(-1))
        assert tokens is not None  # NCCL gathers everywhere
        return tokens

    # --- graphs ---

    def _capture(self, sizes: list[int]) -> None:
        """The largest first: the others fit into its memory."""
        pool = None
        for size in reversed(sizes):
            with torch.inference_mode():
                self._rows.zero_()  # the slots of a larger size would be positions, past a sequence's end
                self._rows[size : 2 * size] = self._nobody
                self._forward_decode(size)  # compiles kernels, makes room for the libraries' own needs
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                # This thread's calls alone: NCCL's and the heartbeat's threads are none of the capture's business.
                with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                    out = self._forward_decode(size)
            pool = pool or graph.pool()
            self._graphs[size] = graph, out
        self._graphs = dict(sorted(self._graphs.items()))
