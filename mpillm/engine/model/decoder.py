"""A decoder over a flat batch: its rows are the tokens of a step, from any sequences.

Its layers follow the composition of the model's family (`shape.families`; `layers` has their formula).

`Weights` gives a rank its own heads, intermediate values, experts and vocabulary. So a rank computes the
model's formula on its part, and only sums over the TP group are added: of the outputs of attention,
feed-forward and embedding. `Weights` also reorders the rows of the q and k projections, so that the values
that a rotary embedding pairs are adjacent. The rotation is then one complex product, in place. Scores do not
change, and cached keys keep that order.

Attention is an argument of each step. All operations except matrix products are in `ops` or, on a GPU, in
`kernels`.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from mpillm.engine.kernels import ops
from mpillm.engine.kernels.linear import Linear
from mpillm.engine.kernels.ops import Partial
from mpillm.engine.model.feed_forward import ExpertMixture
from mpillm.engine.model.layers import Norm, Product
from mpillm.engine.model.rope import rotations
from mpillm.engine.model.step_parts import Attention, LayerStored, Ops
from mpillm.engine.model.torch_parts import TorchParts
from mpillm.engine.parallel.groups import Groups
from mpillm.engine.shape.model_config import ModelConfig
from mpillm.engine.weights.rank_weights import Weights


class Features:
    """Outputs of some layers in the last step, side by side in `rows` [max rows, layers * hidden]."""

    def __init__(self, layers: tuple[int, ...], rows: Tensor) -> None:
        """`layers`: their indices; the model's number of layers stands for the last layer's normed output.

        `rows` stays at its address, for CUDA graphs. Each step fills the first rows.
        """
        self.layers = layers
        self.rows = rows

    def note(self, layer: int, x: Tensor) -> None:
        """Keep x [n, hidden], the output of `layer`, which is one of `layers`."""
        width = x.shape[1]
        at = width * self.layers.index(layer)
        self.rows[: len(x), at : at + width] = x


class Decoder:
    """This rank's weights and part of the forward pass.

    Holds no state of sequences.
    """

    in_parts = True  # `forward` consists of `before` and `leave`

    def __init__(
        self, config: ModelConfig, weights: Weights, max_seq_len: int, groups: Groups, ops: Ops = ops
    ) -> None:
        """Read layer by layer from `weights`; raises ConfigError if a tensor cannot be read."""
        layout, parts = groups.layout, TorchParts(weights, max_seq_len, groups, ops)
        self.config = config
        self._groups = groups
        self._ops = ops
        self.layers = [parts.layer(i) for i in layout.layers(config)]
        self.lm_head: Linear | None = None
        if layout.is_first_stage or (layout.is_last_stage and config.tie_word_embeddings):
            self.embedding = weights.get("model.embed_tokens")
        self._positions: Tensor | None = None  # learned positions
        if layout.is_first_stage and config.family.embedding.has_positions:
            self._positions = weights.get("model.embed_positions")
        if layout.is_last_stage:
            self._norm: Norm = parts.norm(config.family.norm)
            self.lm_head = Linear(self.embedding if config.tie_word_embeddings else weights.get("lm_head"))
        self.features: Features | None = None
        self.vocabulary = layout.vocabulary(config)
        self.rotations = rotations(config, max_seq_len).to(weights.device)
        self.kinds = [layer.attention.kind for layer in self.layers]

    def keep_features(self, features: Features) -> None:
        """Keep outputs of layers in each step."""
        self.features = features
        for layer in features.layers:
            if layer + 1 < len(self.layers):
                self.layers[layer + 1].observe = functools.partial(self._note, features, layer)

    def read_choices_above(self, n_rows: int) -> None:
        """Let the host wait for the choice of experts in steps of more than `n_rows` rows.

        Such steps must not be CUDA graphs.
        """
        for layer in self.layers:
            if isinstance(layer.feed_forward, ExpertMixture):
                layer.feed_forward.one_by_one_above = n_rows

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return rows of the embedding for `tokens` at `positions` (int64)."""
        if self._groups.layout.tp_size == 1:
            return self.placed(self.embedding.index_select(0, tokens), positions)
        is_own = (tokens >= self.vocabulary.start) & (tokens < self.vocabulary.stop)
        x = self.embedding.index_select(0, torch.where(is_own, tokens - self.vocabulary.start, 0))
        return self.placed(self._groups.all_reduce(x.mul_(is_own[:, None])), positions)

    def placed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Scale x (embedding rows) or add learned positions if the family requires it; x may be changed."""
        if self.config.family.embedding.is_scaled:
            scale = torch.tensor(self.config.hidden_size**0.5, dtype=x.dtype)  # rounded, as in transformers
            x.mul_(scale.item())
        return x if self._positions is None else x.add_(self._positions.index_select(0, positions))

    def forward(
        self, x: Tensor, attention: Attention, logits_rows: Tensor | None, layer_stored: LayerStored = None
    ) -> Tensor:
        """Run `x`, the step's rows (changed in place), through this stage's layers.

        The last stage returns the rows `logits_rows` (int64; None: all), normed.
        """
        attended: Tensor | None = None
        for layer in range(len(self.layers)):
            attended = attention(layer, self.before(layer, x, attended))
            if layer_stored is not None:
                layer_stored(layer)
        assert attended is not None
        return self.leave(x, attended, logits_rows)

    # The parts of `forward`, from one attention to the next.

    def before(self, layer: int, x: Tensor, attended: Tensor | None) -> Product:
        """Return a layer's queries, keys and values; x becomes the layer's residual.

        `attended`: the output of attention in the layer before; None for the first layer.
        """
        delta = None if attended is None else self.layers[layer - 1].after(x, attended)
        return self.layers[layer].before(x, delta)

    def leave(self, x: Tensor, attended: Tensor, logits_rows: Tensor | None, n_padded: int = 0) -> Tensor:
        """Return the result of `forward` from the last attention's output.

        `n_padded`: the number of computed rows with padding; 0: as many as x has.
        """
        features = self.features if self.lm_head is not None else None
        keeps_last = features is not None and self.config.n_layers in features.layers
        if self.lm_head is not None and logits_rows is not None and not keeps_last:
            x = self._chosen(x, logits_rows, n_padded or len(x))  # nothing reads the other rows
            attended = attended.index_select(0, logits_rows)
        elif keeps_last and n_padded > len(x):  # `SharedRows.splits` may differ for fewer rows
            x = self._full_residual(x, n_padded)
        delta = self.layers[-1].after(x, attended)
        if self.lm_head is None:
            assert not isinstance(delta, Partial)  # with several stages, ranks share no rows
            return x if delta is None else x.add_(self._ops.scaled(delta))
        last: Tensor = self._norm(x, delta)
        if keeps_last:
            assert features is not None
            features.note(self.config.n_layers, last)
            last = last if logits_rows is None else last.index_select(0, logits_rows)
        return last

    def logits(self, normed: Tensor) -> Tensor:
        """Return this rank's columns of the logits, in the weights' dtype, from rows of `forward`."""
        assert self.lm_head is not None
        return self.lm_head(normed)

    def _note(self, features: Features, layer: int, x: Tensor) -> None:
        features.note(layer, self._full_residual(x, len(x)))

    def _full_residual(self, x: Tensor, n_computed: int) -> Tensor:
        """Return the residual x with all rows on each rank, from `n_computed` computed rows."""
        shared = self._groups.shared_rows
        if shared is None or not shared.splits(n_computed, x.dtype):
            return x
        return self._chosen(x, torch.arange(len(x), device=x.device), n_computed)

    def _chosen(self, x: Tensor, rows: Tensor, n_computed: int) -> Tensor:
        """Return `rows` of the residual x, of which each rank may have only its own rows."""
        shared = self._groups.shared_rows
        if shared is None or not shared.splits(n_computed, x.dtype):
            return x.index_select(0, rows)
        return self._groups.all_reduce(shared.own(x, rows))
