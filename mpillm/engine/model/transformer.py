"""Llama and its relatives (`families`), over a flat batch: a step's tokens are rows, whatever their sequence.

`Weights` reorders the rows of the q and k projections so that the values that a rotary embedding pairs are
adjacent; the rotation is then one complex product, in place. Scores do not change; cached keys keep that
order.

`Weights` gives a rank its own heads, intermediate values, experts and vocabulary. So the model runs as
written, on fewer of them, and only sums over the TP group are added: after `o`, after the feed-forward and
after the embedding.

Only matrix products are here: attention comes with the step, the rest is in `ops` or, on a GPU, in `kernels`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mpillm.engine.kernels import ops
from mpillm.engine.kernels.linear import Linear
from mpillm.engine.kernels.ops import Partial, UnscaledProduct
from mpillm.engine.model.features import Features
from mpillm.engine.model.feed_forward import Mixture, Mlp
from mpillm.engine.model.latent import LatentQkv
from mpillm.engine.model.layer_kind import PLAIN, LayerKind
from mpillm.engine.model.rope import rotations
from mpillm.engine.model.step_parts import Adapters, Attention, Ops
from mpillm.engine.parallel.groups import Groups
from mpillm.engine.shape import composition
from mpillm.engine.shape.layout import length
from mpillm.engine.shape.model_config import ModelConfig
from mpillm.engine.weights.rank_weights import Weights


class Layer:
    def __init__(self, weights: Weights, index: int, experts: range, max_seq_len: int, ops: Ops) -> None:
        prefix = f"model.layers.{index}"
        self.input_norm = weights.get(f"{prefix}.input_layernorm")
        self.qkv: Linear | LatentQkv
        if (latent := weights.config.latent) is not None:
            self.qkv = LatentQkv(weights, f"{prefix}.self_attn", latent)
        else:
            self.qkv = weights.linear(f"{prefix}.self_attn.qkv_proj")
        config, attention = weights.config, f"{prefix}.self_attn"
        parts = config.layer(index)
        heads = parts.attention
        if not isinstance(heads, composition.GroupedQueryAttention):
            heads = composition.GroupedQueryAttention()
        self.qkv_bias = weights.bias(f"{attention}.qkv_proj") if heads.qkv_bias else None
        self.qk_norms: tuple[Tensor, Tensor] | None = None  # of a head of q, and of k
        if heads.qk_norm:
            self.qk_norms = weights.get(f"{attention}.q_norm"), weights.get(f"{attention}.k_norm")
        self.o = weights.linear(f"{prefix}.self_attn.o_proj")
        self.o_bias = weights.bias(f"{attention}.o_proj") if heads.o_bias else None
        post_norm = weights.get(f"{prefix}.post_attention_layernorm")
        self.norms_after: tuple[Tensor, Tensor] | None = None  # of what attention and feed-forward add
        self.post_norm = post_norm  # of the feed-forward's input
        if isinstance(parts, composition.SandwichNorm):
            self.norms_after = post_norm, weights.get(f"{prefix}.post_feedforward_layernorm")
            self.post_norm = weights.get(f"{prefix}.pre_feedforward_layernorm")
        self.kind = LayerKind(
            config.window(index),
            max_seq_len if heads.local_rope else 0,
            weights.get(f"{attention}.sinks").float() if heads.sinks else None,
            latent.kv_lora_rank if latent is not None else 0,
        )
        self.norm_biases: tuple[Tensor | None, Tensor | None] = None, None  # of the two norms of inputs
        if isinstance(parts.norm, composition.LayerNorm):
            names = f"{prefix}.input_layernorm", f"{prefix}.post_attention_layernorm"
            self.norm_biases = weights.bias(names[0]), weights.bias(names[1])
        self.mlp: Mlp | Mixture
        feed_forward, mlp = parts.feed_forward, f"{prefix}.mlp"
        if isinstance(feed_forward, composition.Mixture):
            self.mlp = Mixture(weights, prefix, feed_forward, experts, ops)
        elif isinstance(feed_forward, composition.GatedFeedForward):
            self.mlp = Mlp(weights, ops, f"{mlp}.gate_up_proj", f"{mlp}.down_proj", feed_forward.activation)
        else:
            self.mlp = Mlp(weights, ops, f"{mlp}.c_fc", f"{mlp}.c_proj", None)

    @property
    def is_plain(self) -> bool:
        """Whether nothing is in it but Llama's norms, products, attention and SwiGLU."""
        added = self.qkv_bias, self.qk_norms, self.o_bias, self.norms_after
        is_silu = isinstance(self.mlp, Mlp) and isinstance(self.qkv, Linear) and self.mlp.activation == "silu"
        return is_silu and self.kind == PLAIN and all(part is None for part in (*added, *self.norm_biases))


class Llama:
    """This rank's weights and part of the forward pass.

    Holds no state of sequences.
    """

    in_parts = True  # `forward` is `enter`, `between` and `leave`

    def __init__(
        self, config: ModelConfig, weights: Weights, max_seq_len: int, groups: Groups, ops: Ops = ops
    ) -> None:
        """Read layer by layer from `weights`; raises ConfigError if a tensor cannot be read."""
        layout = groups.layout
        self.config = config
        self._groups = groups
        self._ops = ops
        self._n_q, self._n_kv = layout.n_heads(config), length(layout.kv_heads(config))
        self._n_heads = self._n_q + 2 * self._n_kv
        experts = layout.experts(config)
        self.layers = [Layer(weights, i, experts, max_seq_len, ops) for i in layout.layers(config)]
        self.lm_head: Linear | None = None
        if layout.is_first_stage or (layout.is_last_stage and config.tie_word_embeddings):
            self.embedding = weights.get("model.embed_tokens")
        self._positions: Tensor | None = None  # learned ones
        if layout.is_first_stage and config.family.embedding.has_positions:
            self._positions = weights.get("model.embed_positions")
        self._norm_bias: Tensor | None = None
        if layout.is_last_stage:
            self._norm = weights.get("model.norm")
            if isinstance(config.family.norm, composition.LayerNorm):
                self._norm_bias = weights.bias("model.norm")
            self.lm_head = Linear(self.embedding if config.tie_word_embeddings else weights.get("lm_head"))
        self.features: Features | None = None  # to keep, of each step
        self.vocabulary = layout.vocabulary(config)
        self.rotations = rotations(config, max_seq_len).to(weights.device)
        self.kinds = [layer.kind for layer in self.layers]

    def read_choices_above(self, n_rows: int) -> None:
        """Let the host wait for the choice of experts in steps of more rows, which no CUDA graph may have."""
        for layer in self.layers:
            if isinstance(layer.mlp, Mixture):
                layer.mlp.one_by_one_above = n_rows

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return rows of the embedding for `tokens` at `positions` (int64)."""
        if self._groups.layout.tp_size == 1:
            return self.placed(self.embedding.index_select(0, tokens), positions)
        mine = (tokens >= self.vocabulary.start) & (tokens < self.vocabulary.stop)
        x = self.embedding.index_select(0, torch.where(mine, tokens - self.vocabulary.start, 0))
        return self.placed(self._groups.all_reduce(x.mul_(mine[:, None])), positions)

    def placed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return rows of the embedding as the layers take them; x may be changed."""
        if self.config.family.embedding.is_scaled:
            scale = torch.tensor(self.config.hidden_size**0.5, dtype=x.dtype)  # rounded, as in transformers
            x.mul_(scale.item())
        return x if self._positions is None else x.add_(self._positions.index_select(0, positions))

    def forward(
        self,
        x: Tensor,
        attention: Attention,
        logits_rows: Tensor | None,
        layer_stored: Callable[[int], None] | None = None,
        adapters: Adapters | None = None,
    ) -> Tensor:
        """Run `x`, the step's rows (changed in place), through this stage's layers.

        The last stage returns the rows `logits_rows` (int64; None: all), normed. Every stage calls
        `layer_stored` with each of its layers as soon as the cache has the layer's keys and values.
        `adapters` change products of all rows and require `logits_rows` None.
        """
        qkv = self.enter(x, adapters)
        last = len(self.layers) - 1
        for i in range(last):
            attended = attention(i, qkv)
            if layer_stored is not None:
                layer_stored(i)
            qkv = self.between(i, x, attended, adapters)
        attended = attention(last, qkv)
        if layer_stored is not None:
            layer_stored(last)
        return self.leave(x, attended, logits_rows, adapters)

    # The parts of `forward`: what comes before, between and after attention.

    def enter(self, x: Tensor, adapters: Adapters | None = None) -> Tensor | UnscaledProduct:
        """Return the first layer's qkv."""
        first = self.layers[0]
        normed = self._add_norm(x, None, first.input_norm, first.norm_biases[0], first.qkv.rounds(len(x)))
        return self._qkv(0, normed, adapters)

    def between(
        self, layer: int, x: Tensor, attended: Tensor, adapters: Adapters | None = None
    ) -> Tensor | UnscaledProduct:
        """Return the next layer's qkv; x becomes its residual."""
        delta = self._rest(layer, x, attended, adapters)
        following = self.layers[layer + 1]
        rounds = following.qkv.rounds(len(x))
        normed = self._add_norm(x, delta, following.input_norm, following.norm_biases[0], rounds)
        if self.features is not None and layer in self.features.layers:
            self.features.note(layer, self._whole_residual(x, len(x)))
        return self._qkv(layer + 1, normed, adapters)

    def leave(
        self,
        x: Tensor,
        attended: Tensor,
        logits_rows: Tensor | None,
        adapters: Adapters | None = None,
        n_padded: int = 0,
    ) -> Tensor:
        """Return what `forward` does. `n_padded`: the rows that were computed, if they were more than x."""
        features = self.features if self.lm_head is not None else None
        of_all = features is not None and self.config.n_layers in features.layers
        if (
            self.lm_head is not None and logits_rows is not None and not of_all
        ):  # nothing reads the other rows
            x = self._chosen(x, logits_rows, n_padded or len(x))
            attended = attended.index_select(0, logits_rows)
        elif of_all and n_padded > len(x):  # fewer rows may be shared in another way
            x = self._whole_residual(x, n_padded)
        delta = self._rest(len(self.layers) - 1, x, attended, adapters)
        if self.lm_head is None:
            assert not isinstance(delta, Partial)  # ranks of several stages share no rows
            return x if delta is None else x.add_(self._ops.scaled(delta))
        last: Tensor = self._add_norm(x, delta, self._norm, self._norm_bias)
        if of_all:
            assert features is not None
            features.note(self.config.n_layers, last)
            last = last if logits_rows is None else last.index_select(0, logits_rows)
        return last

    def _add_norm(
        self,
        x: Tensor,
        delta: Tensor | UnscaledProduct | Partial | None,
        weight: Tensor,
        bias: Tensor | None,
        rounds: bool = False,
    ) -> Any:
        """As `ops.add_norm`; with a bias the norm is a LayerNorm, which never rounds."""
        if bias is None:
            return self._ops.add_norm(x, delta, weight, self.config.rms_norm_eps, rounds)
        assert not isinstance(delta, Partial)
        if delta is not None:
            x.add_(self._ops.scaled(delta))
        return F.layer_norm(x, weight.shape, weight, bias, self.config.rms_norm_eps)

    def _qkv(self, layer: int, normed: Any, adapters: Adapters | None) -> Tensor | UnscaledProduct:
        product = self.layers[layer].qkv
        if isinstance(product, LatentQkv):
            return product(normed)
        qkv = product.unscaled(normed)
        if adapters is not None:
            adapters.add(layer, "qkv", normed, qkv)
        if (bias := self.layers[layer].qkv_bias) is not None:
            qkv = self._ops.scaled(qkv).add_(bias)
        if (norms := self.layers[layer].qk_norms) is not None:
            heads = self._by_head(self._ops.scaled(qkv))
            assert isinstance(heads, Tensor)
            n_q, n_kv = self._n_q, self._n_kv
            for part, weight in zip((heads[:, :n_q], heads[:, n_q : n_q + n_kv]), norms, strict=True):
                part.copy_(ops.norm(part, weight, self.config.rms_norm_eps))
            return heads
        return self._by_head(qkv)

    def _rest(
        self, i: int, x: Tensor, attended: Tensor, adapters: Adapters | None
    ) -> Tensor | UnscaledProduct | Partial | None:
        """Run the rest of a layer after attention: return what is still to be added to x, if anything is."""
        layer = self.layers[i]
        if isinstance(layer.qkv, LatentQkv):
            attended = layer.qkv.results(attended)
        # What a product may be added to at once: a part of a sum and what is changed before are not.
        is_whole = self._groups.layout.tp_size == 1 and adapters is None
        residual = x if is_whole and layer.norms_after is None else None
        part: Tensor | UnscaledProduct | None = None
        if residual is not None and (few := layer.o.few(len(x))) is not None:
            few(attended, residual=residual)
        else:
            part = layer.o.unscaled(attended)
        if adapters is not None:
            adapters.add(i, "o", attended, part)
        if layer.o_bias is not None:
            if part is None:
                x.add_(layer.o_bias)
            else:
                part = self._ops.scaled(part).add_(layer.o_bias)
        delta = self._sum(part, None if layer.norms_after is None else layer.norms_after[0])
        rounds = layer.mlp.rounds(len(x))
        normed = self._add_norm(x, delta, layer.post_norm, layer.norm_biases[1], rounds)
        added = layer.mlp(normed, i, adapters, residual)
        return self._sum(added, None if layer.norms_after is None else layer.norms_after[1])

    def _whole_residual(self, x: Tensor, n_computed: int) -> Tensor:
        """Return the residual x with all its rows on each rank, of `n_computed` that were computed."""
        shared = self._groups.shared_rows
        if shared is None or not shared.splits(n_computed, x.dtype):
            return x
        return self._chosen(x, torch.arange(len(x), device=x.device), n_computed)

    def _chosen(self, x: Tensor, rows: Tensor, n_computed: int) -> Tensor:
        """Return `rows` of the residual x, of which each rank may have its own only."""
        shared = self._groups.shared_rows
        if shared is None or not shared.splits(n_computed, x.dtype):
            return x.index_select(0, rows)
        return self._groups.all_reduce(shared.own(x, rows))

    def _by_head(self, qkv: Tensor | UnscaledProduct) -> Tensor | UnscaledProduct:
        if isinstance(qkv, UnscaledProduct):
            return qkv._replace(numbers=qkv.numbers.view(-1, self._n_heads, self.config.head_dim))
        return qkv.view(-1, self._n_heads, self.config.head_dim)

    def _sum(
        self, product: Tensor | UnscaledProduct | None, norm: Tensor | None = None
    ) -> Tensor | UnscaledProduct | Partial | None:
        """Sum over the TP group, whose ranks have scales of their own. None has been added to the residual.

        A rank that is alone leaves the scales to the next operation, one that shares rows with the others
        also the sum. With `norm` the sum is normed.
        """
        if norm is not None:
            assert product is not None
            whole = self._groups.all_reduce(self._ops.scaled(product))
            normed: Tensor = self._ops.add_norm(whole, None, norm, self.config.rms_norm_eps)
            return normed
        if product is None or self._groups.layout.tp_size == 1:
            return product
        shared = self._groups.shared_rows
        if shared is not None and not isinstance(self.config.family.norm, composition.LayerNorm):
            return Partial(product, shared)
        return self._groups.all_reduce(self._ops.scaled(product))

    def logits(self, normed: Tensor) -> Tensor:
        """Return this rank's columns of the logits, in the weights' dtype, from `forward`'s last stage."""
        assert self.lm_head is not None
        return self.lm_head(normed)
