"""CUDA graphs of the operations between the attentions of a step with contexts.

Launching the kernels of such a step one by one takes a host 5 to 30 ms, longer than a GPU needs for a few
hundred rows. Attention depends on the lengths of contexts, all other operations only on the number of rows.
So for some numbers of rows (sizes), a layer is one graph, from an attention to the next, and the host
launches only attention. A step with fewer rows is padded with rows of an unused slot.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from mpillm.engine.model.model_part import ModelPart
from mpillm.engine.model.paged_attention import PagedAttention
from mpillm.engine.model.step_parts import LayerStored
from mpillm.engine.run import compilations
from mpillm.engine.tensors.graphs import capture, gpu_ms, too_slow


class LayerGraphs:
    """The graphs of a rank: for each size, one graph for each of its layers."""

    def __init__(
        self,
        part: ModelPart,
        embed: Callable[[Tensor, Tensor, Tensor], Tensor],
        attention: Callable[[Tensor, Tensor], PagedAttention],
        padding_slot: int,
        max_rows: int,
        pool: Any,
    ) -> None:
        """Allocate buffers for graphs of up to `max_rows` rows.

        Args:
            embed: Takes tokens, slots and positions.
            attention: Takes slots and positions.
            pool: The memory pool of the decode graphs, which never run at the same time.
        """
        model, device = part.model, part.device
        self._part, self._embed, self._attention = part, embed, attention
        self._padding_slot, self._pool = padding_slot, pool
        self._pieces: dict[int, list[Callable[[], None]]] = {}  # size -> replay the graph of each layer
        config = part.info.config
        n_all = part.n_heads + 2 * part.cache.keys.shape[2]
        # Tokens, slots, positions.
        self._rows = torch.zeros(3 * max_rows, dtype=torch.int64, device=device)
        self._x = torch.zeros(max_rows, config.hidden_size, dtype=part.dtype, device=device)
        self._turned = torch.zeros(max_rows, n_all, config.head_dim, dtype=part.dtype, device=device)
        attended_shape = max_rows, part.n_heads * config.head_dim
        self._attended = torch.zeros(attended_shape, dtype=part.dtype, device=device)
        self._n_layers = len(model.layers)

    def fill(self, sizes: Iterable[int], launch_ms: float) -> None:
        """Capture graphs of `sizes`, in order, while their replay takes at most `launch_ms`. Collective."""
        times: dict[int, int] = {}
        for size in sizes:
            self.add(size)
            took_ms = self.replay_ms(size)
            # Ranks of a TP group wait for each other in each layer: all need the first rank's sizes.
            measured = torch.tensor([1e6 * took_ms, took_ms > launch_ms], device=self._part.device).long()
            times[size], is_slow = self._part.groups.broadcast(measured).tolist()
            if is_slow:
                del self._pieces[size], times[size]
                break
        for size in too_slow(times):
            del self._pieces[size]

    def size_for(self, n_rows: int) -> int | None:
        """Return the smallest size with at least `n_rows` rows."""
        return next((size for size in self._pieces if size >= n_rows), None)

    def run(
        self,
        rows: Tensor,
        n: int,
        attention: PagedAttention,
        logits_rows: Tensor,
        layer_stored: LayerStored,
    ) -> Tensor:
        """Run a step of `n` rows, and return the result of `Decoder.forward`.

        Args:
            rows: Tokens, slots and positions, with the padding last: int64 [3, size].
            attention: Attention without the padding.
        """
        size, part = rows.shape[1], self._part
        self._rows[: 3 * size].copy_(rows.view(-1))
        if not part.groups.layout.is_first_stage:
            self._x[:n] = part.receive_hidden(n)
            self._x[n:size] = 0  # padding, to which each step would add
        for layer, replay in enumerate(self._pieces[size]):
            replay()
            attention.attend(layer, self._turned[:n], self._attended[:n])
            if layer_stored is not None:
                layer_stored(layer)
        return part.model.leave(self._x[:n], self._attended[:n], logits_rows, n_padded=size)

    def _piece(self, layer: int, size: int) -> None:
        """Compute from the previous layer's attention, or from the tokens, to the attention of `layer`."""
        tokens, slots, positions = self._rows[: 3 * size].view(3, size)
        model, x = self._part.model, self._x[:size]
        if layer:
            qkv = model.before(layer, x, self._attended[:size])
        else:
            if self._part.groups.layout.is_first_stage:
                x.copy_(self._embed(tokens, slots, positions))
            qkv = model.before(0, x, None)
        self._attention(slots, positions).store(layer, qkv, self._turned[:size])

    @torch.inference_mode()
    def add(self, size: int) -> None:
        """Capture the graphs of a size, at most `max_rows`. On a CPU, `run` computes without graphs."""
        pieces = [functools.partial(self._piece, layer, size) for layer in range(self._n_layers)]
        if self._part.device.type != "cuda":
            self._pieces[size] = list(pieces)
            return
        self._rows.zero_()
        self._rows[size : 2 * size] = self._padding_slot
        for piece in pieces:  # compiles kernels and lets libraries allocate their workspaces
            piece()
        self._pieces[size] = [capture(piece, self._pool)[0].replay for piece in pieces]
        compilations.note(f"CUDA graphs between attentions, {size} rows")

    @torch.inference_mode()
    def replay_ms(self, size: int) -> float:
        """Return how long a GPU takes for the graphs of a size, without attention."""
        return gpu_ms(lambda: [replay() for replay in self._pieces[size]])
