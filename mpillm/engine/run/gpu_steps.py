"""Compute steps on a GPU: the same model, with `kernels` between the products. The host never waits.

Only a step's tokens go back to the host, which reads them while the next step runs. A new token also stays on
the device, under its sequence's slot. If the host has not read a row's token yet (`UNREAD`), the row takes it
from the slot. Block tables are also on the device.

If every sequence of a step adds one token, and maybe draft tokens (decode), the step is a CUDA graph. Graphs
are captured at load for each size of a `ladder`. A step with fewer rows is padded with rows of an unused
slot, whose block is `NULL_BLOCK`. In other steps, the operations between two attentions are a graph
(`LayerGraphs`), unless the step is long enough to hide the launches of all kernels.
"""

from __future__ import annotations

import functools
import importlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpillm.engine.model.context_plan import MIN_QUERIES, ContextPlan
from mpillm.engine.model.model_part import ModelPart
from mpillm.engine.model.paged_attention import Contexts, LayerCache, PagedAttention
from mpillm.engine.model.step_parts import LayerStored
from mpillm.engine.run import compilations
from mpillm.engine.run.layer_graphs import LayerGraphs
from mpillm.engine.schedule.block_allocator import NULL_BLOCK
from mpillm.engine.schedule.sampling_params import SamplingParams
from mpillm.engine.schedule.step import Span, Step
from mpillm.engine.shape.engine_config import SchedulerConfig
from mpillm.engine.shape.memory import MAX_GRAPH_ROWS, max_copied_rows
from mpillm.engine.shape.model_info import ModelInfo
from mpillm.engine.tensors.graphs import capture, gpu_ms, ladder, too_slow
from mpillm.engine.tensors.segments import grow_segments
from mpillm.engine.tensors.staging import last_of_each, to_device

_MIN_GRAPH_ROWS = 16  # of a step with contexts whose layers are graphs
# A host's time for launching the products of an expert of a layer, and a GPU's speed: measured on H200s.
_HOST_S, _FLOPS_PER_S = 0.3e-3, {"none": 0.6e15, "fp8": 1.2e15}
_SAMPLING = SamplingParams(1.0), SamplingParams(1.0, top_k=8), SamplingParams(1.0, top_p=0.9)
_SAMPLED_ROWS = 16  # in the warm-up: sampling runs only PyTorch's kernels; more rows' logits take gigabytes


def use_gpu(device: str) -> Any:
    """Make `device` PyTorch's current device and return the kernels for it."""
    torch.cuda.set_device(torch.device(device))
    grow_segments()
    compilations.watch_triton()
    return importlib.import_module("mpillm.engine.kernels.step_kernels")


def rows_that_hide_launches(info: ModelInfo) -> int:
    """Return how many rows of a step keep a GPU busy with an expert while its host launches the next one.

    Assumes that all experts are chosen equally often.
    """
    c = info.config
    if not c.n_experts or info.quantization not in _FLOPS_PER_S:
        return 0
    of_row = 6 * c.hidden_size * c.intermediate_size * info.layout.ep_size // info.layout.tp_size
    of_expert = _HOST_S * _FLOPS_PER_S[info.quantization] / of_row
    return math.ceil(of_expert * c.n_experts / c.n_experts_per_token)


class GpuSteps:
    """Implements `Steps`. On a CPU it works with plain `kernels`, slowly and without graphs."""

    def __init__(
        self,
        part: ModelPart,
        config: SchedulerConfig,
        kernels: Any,
        decode_rows: int,
        fp8_contexts: bool = False,
    ) -> None:
        """Capture the graphs, which takes seconds.

        `decode_rows`: of the largest step without contexts; `fp8_contexts`: see `PagedAttention`.
        """
        info, device, max_batch_size = part.info, part.device, config.max_batch_size
        self._part = part
        self.kernels = kernels
        # Every rank of the TP group feeds a token to its sequence's next step itself. With several stages,
        # another rank needs the token.
        self.n_ahead = 1 if part.groups.layout.pp_size == 1 else 0
        self._max_batch_size = max_batch_size
        self._decode_rows = decode_rows
        self._padding_slot = max_batch_size  # of rows that pad a graph
        with torch.inference_mode():
            self._rotations = torch.view_as_real(part.model.rotations).flatten(1).contiguous()
            n_per_slot = part.cache.blocks_for(info.max_seq_len)
            # The blocks of each slot, and the window blocks.
            self._table, self._window_table = (
                torch.zeros(max_batch_size + 1, n, dtype=torch.int32, device=device)
                for n in (n_per_slot, n_per_slot if part.window_cache is not None else 0)
            )
            self._layer_caches = [
                LayerCache(
                    cache.keys[i],
                    cache.values[i],
                    None if cache.scales is None else cache.scales[i],
                    self._window_table if windowed else self._table,
                )
                for windowed, i in part.places
                for cache in [part.window_cache if windowed and part.window_cache is not None else part.cache]
            ]
            self._last = torch.zeros(max_batch_size + 1, dtype=torch.int64, device=device)
            # Tokens, slots, positions.
            self._rows = torch.zeros(3 * self._decode_rows, dtype=torch.int64, device=device)
            hidden_shape = self._decode_rows, info.config.hidden_size
            self._hidden = torch.zeros(hidden_shape, dtype=part.dtype, device=device)
        self._fp8_contexts = fp8_contexts
        self._token_slots = self._last[:0]  # slots of the rows that the last `forward` returned
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._layers: LayerGraphs | None = None  # made by the warm-up
        if device.type == "cuda":
            min_rows = max(self._decode_rows, MAX_GRAPH_ROWS, rows_that_hide_launches(info))
            part.model.read_choices_above(min_rows)
            self._capture(ladder(self._decode_rows))

    # --- a step ---

    def forward(
        self, step: Step, layer_stored: LayerStored = None, all_rows: bool = False, layerwise: bool = False
    ) -> Tensor:
        self._write_blocks(step.spans)
        slots, n_cached, counts = np.array([(span.slot, span.n_cached, span.n_new) for span in step.spans]).T
        starts = np.cumsum(counts) - counts
        positions = np.arange(len(step.tokens)) + np.repeat(n_cached - starts, counts)
        rows = np.array([step.tokens, np.repeat(slots, counts), positions])
        # Contexts come last: if the last span decodes, and each row gets a token, all spans decode.
        if layer_stored is None and step.spans[-1].decodes and len(step.tokens) == len(step.logits_rows):
            x, self._token_slots = self._decode(rows)
        else:
            x, self._token_slots = self._mixed(step, rows, starts.tolist(), layer_stored, all_rows)
        return x

    def feed(self, tokens: Tensor) -> None:
        self._last.index_copy_(0, self._token_slots, tokens)

    def _decode(self, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Run a step in which each row gets a token.

        Returns this stage's output, and the slots that the tokens go to.
        """
        n = rows.shape[1]
        size = next((size for size in self._graphs if size >= n), n)
        padded = self._padded(rows, size)
        self._rows[: 3 * size].copy_(to_device(padded.reshape(-1), self._part.device))
        if not self._part.groups.layout.is_first_stage:
            self._hidden[:n] = self._part.receive_hidden(n)
        if size in self._graphs:
            graph, out = self._graphs[size]
            graph.replay()
        else:
            out = self._forward_decode(size)
        fed = last_of_each(rows[1], self._padding_slot)
        is_each = np.array_equal(fed, rows[1])
        return out[:n], self._rows[size : size + n] if is_each else to_device(fed, self._part.device)

    def _forward_decode(self, size: int) -> Tensor:
        """Run a decode step on the contents of the buffers."""
        tokens, slots, positions = self._rows[: 3 * size].view(3, size)
        is_first = self._part.groups.layout.is_first_stage
        x = self._embed(tokens, slots, positions) if is_first else self._hidden[:size]
        return self._part.model.forward(x, self._attention(slots, positions, size, None), None)

    def _mixed(
        self,
        step: Step,
        rows: NDArray[np.int64],
        starts: list[int],
        layer_stored: LayerStored,
        all_rows: bool,
    ) -> tuple[Tensor, Tensor]:
        """Run a step in which some sequences add several tokens.

        `starts`: each sequence's first row. Returns the output of `forward`, and the slots that the tokens of
        `Step.logits_rows` go to.
        """
        n = rows.shape[1]
        n_decoding = sum(span.decodes for span in step.spans)
        n_decode = [*starts, n][n_decoding]
        graph_size = None if self._layers is None else self._layers.size_for(n)
        size = graph_size or n
        plan = self._plan_contexts(step.spans[n_decoding:], starts[n_decoding:])
        logits_rows = np.array(step.logits_rows, np.int64)
        fed = last_of_each(rows[1, logits_rows], self._padding_slot)
        if all_rows:
            logits_rows = np.arange(n)
        arrays = [self._padded(rows, size), logits_rows, fed, *plan.tiles, plan.copies]
        at = np.cumsum([array.size for array in arrays])[:-1].tolist()
        inputs = to_device(np.concatenate([array.reshape(-1) for array in arrays]), self._part.device)
        parts = zip(inputs.tensor_split(at), arrays, strict=True)
        on_device = [part.view(array.shape) for part, array in parts]
        device_rows, device_logits_rows, token_slots, *planned = on_device
        attention = self._attention(device_rows[1], device_rows[2], n_decode, Contexts(plan, *planned))
        if self._layers is not None and graph_size is not None:
            return self._layers.run(device_rows, n, attention, device_logits_rows, layer_stored), token_slots
        is_first = self._part.groups.layout.is_first_stage
        x = self._embed(*device_rows) if is_first else self._part.receive_hidden(n)
        return self._part.model.forward(x, attention, device_logits_rows, layer_stored), token_slots

    def _padded(self, rows: NDArray[np.int64], size: int) -> NDArray[np.int64]:
        """Return tokens, slots and positions, followed by rows of the padding slot."""
        padded = np.zeros((3, size), np.int64)
        padded[1] = self._padding_slot
        padded[:, : rows.shape[1]] = rows
        return padded

    def _plan_contexts(self, spans: list[Span], starts: list[int]) -> ContextPlan:
        part = self._part
        rank, is_scaled = part.model.kinds[0].rank, part.cache.scales is not None
        heads = part.n_heads, part.cache.keys.shape[2]
        n_queries = self.kernels.context_tile(*heads, part.dtype, rank, is_scaled)
        return ContextPlan.of(spans, starts, n_queries, max_copied_rows(part.info.max_seq_len))

    def _embed(self, tokens: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        model = self._part.model
        x: Tensor = self.kernels.embed(model.embedding, tokens, slots, self._last, model.vocabulary.start)
        return model.placed(self._part.groups.all_reduce(x), positions)

    def _attention(
        self, slots: Tensor, positions: Tensor, n_decode: int, contexts: Contexts | None
    ) -> PagedAttention:
        return PagedAttention(
            self.kernels,
            self._layer_caches,
            self._part.n_heads,
            self._rotations,
            slots,
            positions,
            n_decode,
            contexts,
            self._part.model.kinds,
            self._fp8_contexts,
        )

    def _write_blocks(self, spans: list[Span]) -> None:
        """Write the blocks in `spans` into the tables."""
        self._write(self._table, [(s.slot, s.n_blocks_sent, s.blocks) for s in spans if s.blocks])
        of_window = [(s.slot, s.n_window_blocks_sent, s.window_blocks) for s in spans if s.window_blocks]
        self._write(self._window_table, of_window)

    def _write(self, table: Tensor, rows: list[tuple[int, int, list[int]]]) -> None:
        """Write blocks of slots into a table. `rows`: slot, number of its earlier blocks, blocks."""
        at: list[int] = []
        blocks: list[int] = []
        width = table.shape[1]
        for slot, n_blocks_sent, more in rows:
            first = slot * width + n_blocks_sent
            at += range(first, first + len(more))
            blocks += more
        if at:
            places, values = to_device(np.array([at, blocks]), self._part.device)
            table.view(-1).index_copy_(0, places, values.to(torch.int32))

    # --- graphs ---

    def _capture(self, sizes: list[int]) -> None:
        """Capture the graphs, the largest first: the smaller ones fit into its memory."""
        pool = None
        for size in reversed(sizes):
            with torch.inference_mode():
                self._rows.zero_()  # a larger size's slots would be read as positions past a sequence's end
                self._rows[size : 2 * size] = self._padding_slot
                self._forward_decode(size)  # compiles kernels and lets libraries allocate their workspaces
                graph, out = capture(functools.partial(self._forward_decode, size), pool)
            pool = pool or graph.pool()
            self._graphs[size] = graph, out
            compilations.note(f"CUDA graph of a decode step, {size} rows")
        self._graphs = dict(sorted(self._graphs.items()))
        if self._part.groups.layout.tp_size == 1:  # ranks of a group would have to agree on the sizes
            for size in too_slow({size: self._replay_ms(size) for size in self._graphs}):
                del self._graphs[size]

    @torch.inference_mode()
    def _replay_ms(self, size: int) -> float:
        """Replay a graph on padding rows and return how long it takes."""
        self._rows.zero_()
        self._rows[size : 2 * size] = self._padding_slot
        return gpu_ms(self._graphs[size][0].replay)

    # --- warm-up ---

    @torch.inference_mode()
    def warm_up(self, max_num_tokens: int, run: Callable[[Step], object]) -> None:
        for step in self._padding_steps(max_num_tokens):
            run(step)
        if self._part.device.type == "cuda":
            torch.cuda.synchronize()
            self._capture_layers(max_num_tokens, run)

    def _capture_layers(self, max_num_tokens: int, run: Callable[[Step], object]) -> None:
        """Capture graphs of steps with contexts, for sizes whose launches take longer than their kernels."""
        sizes = [size for size in ladder(min(max_num_tokens, MAX_GRAPH_ROWS)) if size >= _MIN_GRAPH_ROWS]
        if not sizes or not self._part.model.in_parts:
            return
        launched = []
        for _ in range(3):
            started = time.perf_counter()
            run(self._padding_step([1, min(2 * _MIN_GRAPH_ROWS, self._part.info.max_seq_len)]))
            launched.append(1e3 * (time.perf_counter() - started))
            torch.cuda.synchronize()
        layers = self._new_layers(sizes[-1])
        layers.fill(sizes, min(launched))
        self._layers = layers

    def _new_layers(self, max_rows: int) -> LayerGraphs:
        return LayerGraphs(
            self._part,
            self._embed,
            lambda slots, positions: self._attention(slots, positions, 0, None),
            self._padding_slot,
            max_rows,
            next((graph.pool() for graph, _ in self._graphs.values()), None),
        )

    def _padding_steps(self, max_num_tokens: int) -> Iterator[Step]:
        """Yield steps that write only to `NULL_BLOCK`.

        Numbers of rows with the same largest power of two in them use the same compiled kernels of Triton.
        """
        longest = self._part.info.max_seq_len
        largest = min(max_num_tokens, self._max_batch_size * longest)
        for n_tokens in [largest, *(1 << i for i in reversed(range(1, (largest - 1).bit_length())))]:
            ones = 1 if n_tokens > 2 and self._max_batch_size > 1 else 0  # decode and contexts
            n_contexts = -(-(n_tokens - ones) // longest)
            contexts = [len(part) for part in np.array_split(range(n_tokens - ones), n_contexts)]
            yield self._padding_step([1] * ones + sorted(contexts))
        for n_new in (2, MIN_QUERIES):  # chunks that are not the first of their contexts
            if largest >= n_new and longest > n_new:
                yield self._padding_step([n_new], n_cached=1)
        for n_rows in reversed(ladder(self._decode_rows)):
            yield self._padding_step([1] * n_rows)
        for n_rows in {1, min(self._max_batch_size, _SAMPLED_ROWS)}:
            for sampling in _SAMPLING:
                yield self._padding_step([1] * n_rows, sampling)

    def _padding_step(
        self, counts: list[int], sampling: SamplingParams | None = None, n_cached: int = 0
    ) -> Step:
        """Return a step whose sequences add these numbers of tokens (ones first) and each get a token."""
        width = self._table.shape[1]
        # As in a real step, one sequence begins a table, and the others have a table.
        spans = [Span(self._padding_slot, n_cached, counts[0], 0, [NULL_BLOCK] * width)]
        spans += [Span(self._padding_slot, 0, n, width) for n in counts[1:]]
        step = Step(spans, [0] * sum(counts), (np.cumsum(counts) - 1).tolist())
        if sampling is not None:
            step.sampling, step.places = [sampling] * len(counts), [0] * len(counts)
            step.not_end = list(range(len(counts)))
        return step
