"""Build a rank's products and norms from a model's composition (see `shape.composition`) and its weights."""

from __future__ import annotations

from collections.abc import Callable

from mpillm.engine.model import layers
from mpillm.engine.model.feed_forward import ExpertMixture, GatedMlp, PlainMlp
from mpillm.engine.model.latent import LatentProjections
from mpillm.engine.model.layers import AddLayerNorm, AddRmsNorm, PreNormLayer, SandwichNormLayer, TpSum
from mpillm.engine.model.projections import GroupedProjections, OutputProduct
from mpillm.engine.model.step_parts import LayerKind, Ops
from mpillm.engine.parallel.groups import Groups
from mpillm.engine.shape import composition
from mpillm.engine.shape.composition import GroupedQueryAttention, LayerNorm, PreNorm
from mpillm.engine.shape.layout import length
from mpillm.engine.weights.rank_weights import Weights


class TorchParts:
    """Parts of a model on this rank."""

    def __init__(self, weights: Weights, max_seq_len: int, groups: Groups, ops: Ops) -> None:
        """`max_seq_len`: rows of a table of rotations (see `rope`)."""
        self._weights = weights
        self._config = weights.config
        self._layout = groups.layout
        self._max_seq_len = max_seq_len
        self._ops = ops
        self._tp_sum = TpSum(groups, ops, norm_adds=not isinstance(self._config.family.norm, LayerNorm))

    def layer(self, index: int) -> layers.Layer:
        """Read a layer's weights. Raises ConfigError if a tensor cannot be read."""
        prefix, parts = f"model.layers.{index}.", self._config.layer(index)
        attention = self._attention(parts.attention, f"{prefix}self_attn")
        feed_forward = self._feed_forward(parts.feed_forward, prefix)
        norm = self.norm(parts.norm, prefix, attention.rounds)
        post_norm = self.norm(parts.post_norm, prefix, feed_forward.rounds)
        common = norm, attention, post_norm, feed_forward, self._tp_sum
        if isinstance(parts, PreNorm):
            return PreNormLayer(*common)
        return SandwichNormLayer(
            *common,
            attention_norm=self.norm(parts.attention_norm, prefix),
            after_norm=self.norm(parts.after_norm, prefix),
        )

    def norm(
        self, norm: composition.Norm, prefix: str = "", rounds: Callable[[int], bool] | None = None
    ) -> layers.Norm:
        """Read a norm; `rounds`: see `AddRmsNorm`."""
        name, eps = f"{prefix}{norm.name}", self._config.rms_norm_eps
        weight = self._weights.get(name)
        if isinstance(norm, LayerNorm):
            return AddLayerNorm(weight, self._weights.bias(name), eps, self._ops)
        return AddRmsNorm(weight, eps, self._ops, rounds)

    def _attention(self, parts: composition.AnyAttention, prefix: str) -> layers.Projections:
        weights = self._weights
        if not isinstance(parts, GroupedQueryAttention):
            return LatentProjections(weights, prefix, parts.sizes, self._output(f"{prefix}.o_proj", False))
        kind = LayerKind(
            parts.window,
            self._max_seq_len if parts.local_rope else 0,
            weights.get(f"{prefix}.sinks").float() if parts.sinks else None,
        )
        n_kv = length(self._layout.kv_heads(self._config))
        return GroupedProjections(
            weights.linear(f"{prefix}.qkv_proj"),
            weights.bias(f"{prefix}.qkv_proj") if parts.qkv_bias else None,
            (weights.get(f"{prefix}.q_norm"), weights.get(f"{prefix}.k_norm")) if parts.qk_norm else None,
            self._output(f"{prefix}.o_proj", parts.o_bias),
            kind,
            (self._layout.n_heads(self._config), n_kv, self._config.head_dim),
            self._config.rms_norm_eps,
            self._ops,
        )

    def _output(self, name: str, bias: bool) -> OutputProduct:
        weights = self._weights
        return OutputProduct(weights.linear(name), weights.bias(name) if bias else None, self._ops)

    def _feed_forward(self, parts: composition.AnyFeedForward, layer: str) -> layers.FeedForward:
        name = f"{layer}{parts.prefix}"
        if isinstance(parts, composition.Mixture):
            return ExpertMixture(self._weights, name, parts, self._layout.experts(self._config), self._ops)
        if isinstance(parts, composition.GatedFeedForward):
            gate_up = self._weights.linear(f"{name}.gate_up_proj")
            return GatedMlp(gate_up, self._output(f"{name}.down_proj", False), parts.activation, self._ops)
        up = self._weights.linear(f"{name}.c_fc"), self._weights.bias(f"{name}.c_fc")
        return PlainMlp(*up, self._output(f"{name}.c_proj", True), self._ops)
