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

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mpillm.engine.model import ops
from mpillm.engine.model.families import CORRECTION, Activation, Experts
from mpillm.engine.model.features import Features
from mpillm.engine.model.latent import LatentQkv
from mpillm.engine.model.layer_kind import PLAIN, LayerKind
from mpillm.engine.model.linear import GroupedLinear, Linear
from mpillm.engine.model.model_config import ModelConfig, RopeScaling
from mpillm.engine.model.ops import Choice, Partial, Rounded, Unscaled
from mpillm.engine.parallel.groups import Groups
from mpillm.engine.weights.rank_weights import Weights


class Attention(Protocol):
    """Attention of a step: qkv [rows, heads + 2 * kv_heads, head_dim] to [rows, heads * head_dim].

    It rotates queries and keys by their positions, stores keys and values, and attends. On a GPU qkv may be
    `Unscaled`.
    """

    def __call__(self, layer: int, qkv: Any) -> Tensor: ...


class Adapters(Protocol):
    """Adds to a product `y` [rows, out] of `x` [rows, in], in place: see `engine.lora`."""

    def add(self, layer: int, name: str, x: Tensor, y: Any) -> None: ...


class Ops(Protocol):
    """See `ops`."""

    def add_norm(
        self,
        x: Tensor,
        delta: Tensor | Unscaled | Partial | None,
        weight: Tensor,
        eps: float,
        rounds: bool = False,
    ) -> Any: ...

    def gated(
        self, gate_up: Tensor | Unscaled, rounds: bool = False, activation: Activation = "silu"
    ) -> Any: ...

    def scaled(self, product: Tensor | Unscaled) -> Tensor: ...

    def route(self, scores: Tensor, n_chosen: int, experts: range, normed: bool = True) -> Choice: ...

    def combine(self, y: Tensor, weights: Tensor) -> Tensor: ...


class Mlp:
    """The dense feed-forward, split over the TP group: the result is a part of a sum over it."""

    def __init__(self, weights: Weights, ops: Ops, gate_up: str, down: str) -> None:
        self._ops = ops
        self.activation = weights.config.family.activation
        self.gate_up = weights.linear(gate_up)
        self.down = weights.linear(down)
        self.biases: tuple[Tensor, Tensor] | None = None  # of one that is not gated
        if not weights.config.family.is_gated:
            self.biases = weights.bias(gate_up), weights.bias(down)

    def __call__(
        self, x: Any, layer: int = 0, adapters: Adapters | None = None, residual: Tensor | None = None
    ) -> Tensor | Unscaled | None:
        """Compute. With `residual` it may add the result there, and return None."""
        n_rows = len(x.numbers if isinstance(x, Rounded) else x)
        few = self.gate_up.few(n_rows) if self.activation == "silu" else None  # which takes SiLU along
        if self.biases is not None:
            first, second = self.biases
            hidden = F.gelu(self._ops.scaled(self.gate_up.unscaled(x)).add_(first), approximate="tanh")
            return self._ops.scaled(self.down.unscaled(hidden)).add_(second)
        if adapters is None and few is not None:
            hidden = few(x, activated=True)
        else:
            gate_up = self.gate_up.unscaled(x)
            if adapters is not None:
                adapters.add(layer, "gate_up", x, gate_up)
            hidden = self._ops.gated(gate_up, self.down.rounds(n_rows), self.activation)
        if residual is not None and (few := self.down.few(n_rows)) is not None:
            few(hidden, residual=residual)
            return None
        down = self.down.unscaled(hidden)
        if adapters is not None:
            adapters.add(layer, "down", hidden, down)
        return down

    def rounds(self, n_rows: int) -> bool:
        """As `Linear.rounds`, for its input."""
        return self.gate_up.rounds(n_rows)


class Mixture:
    """A mixture of experts: the best few for each row, weighted; this rank adds its own experts' part."""

    def __init__(self, weights: Weights, layer: str, names: Experts, experts: range, ops: Ops) -> None:
        """`layer`: the prefix of its tensors; `experts`: this rank's."""
        self._ops = ops
        self._experts = experts
        self._n_chosen = weights.config.n_experts_per_token
        self._normed = weights.config.norms_choice
        self._activation = weights.config.family.activation
        # With more rows cuBLAS, expert by expert, is faster than one kernel for all, although the host waits
        # for the choice: on a GPU, in steps that are no CUDA graphs.
        self.one_by_one_above = math.inf
        router = f"{layer}.{names.prefix}.{names.router}"
        self._router_bias = weights.bias(router) if names.biases else None
        self._correction: Tensor | None = None  # of scores in groups
        self._shared: Mlp | None = None
        if names.grouped:
            self.router = Linear(weights.get(router).float())
            self._correction = weights.get(f"{router}.{CORRECTION}")
            self._groups, self._factor = weights.config.groups, weights.config.routed_factor
            shared = f"{layer}.{names.prefix}.shared_experts"
            self._shared = Mlp(weights, ops, f"{shared}.{names.gate_up}", f"{shared}.{names.down}")
        else:
            self.router = Linear(weights.get(router))
        self.gate_up, self.down = (
            GroupedLinear(
                [weights.linear(name) for name in each],
                [weights.bias(name) for name in each] if names.biases else None,
            )
            for each in (
                [f"{layer}.{names.prefix}.experts.{i}.{part}" for i in experts]
                for part in (names.gate_up, names.down)
            )
        )

    def __call__(
        self, x: Tensor, layer: int = 0, adapters: Adapters | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """Compute; no adapter changes experts, and the result is never added to `residual`."""
        choice = self._chosen(x)
        if len(x) > self.one_by_one_above and not self.gate_up.is_packed:
            down = self._one_by_one(x, choice)
        else:
            hidden = self._ops.gated(self.gate_up(x, choice), self.down.rounds, self._activation)
            down = self.down(hidden, choice)
        combined = self._ops.combine(down, choice.weights)
        if self._shared is None:
            return combined
        shared = self._shared(x)
        assert shared is not None  # it is not added to a residual
        return combined.to(x.dtype).add_(self._ops.scaled(shared))

    def _chosen(self, x: Tensor) -> Choice:
        if self._correction is not None:
            how = self._n_chosen, self._experts, self._normed, self._groups, self._factor
            return ops.route_grouped(self.router(x.float()), self._correction, *how)
        scores = self.router(x)
        if self._router_bias is not None:
            scores = scores + self._router_bias
        return self._ops.route(scores, self._n_chosen, self._experts, self._normed)

    def _one_by_one(self, x: Tensor, choice: Choice) -> Tensor:
        """As `gate_up`, `gated` and `down` on a GPU, with dense products of one expert after the other."""
        from mpillm.engine.kernels.fp8_kernels import quantize_rows

        numbers = quantize_rows(x) if self.gate_up.rounds else x
        out, start = x.new_empty(len(choice.order), self.down.out_features), 0
        for expert, end in enumerate(choice.ends.tolist()):
            if end > start:
                pairs = choice.order[start:end].long()
                gate_up = self.gate_up.of(expert).unscaled(_rows_of(numbers, pairs // self._n_chosen))
                gate_up = self._biased(gate_up, self.gate_up.biases, expert)
                hidden = self._ops.gated(gate_up, self.down.rounds, self._activation)
                out[pairs] = self._biased(self.down.of(expert)(hidden), self.down.biases, expert)
            start = end
        return out

    def _biased(self, product: Any, biases: Tensor | None, expert: int) -> Any:
        return product if biases is None else self._ops.scaled(product).add_(biases[expert])

    def rounds(self, n_rows: int) -> bool:
        """Always False (see `Linear.rounds`): the router needs floats."""
        return False


def _rows_of(x: Tensor | Rounded, rows: Tensor) -> Any:
    if isinstance(x, Rounded):  # whose scales cuBLAS wants at an address of their own: aligned to 16 bytes
        numbers = x.numbers.view(torch.uint8)[rows].view(x.numbers.dtype)
        return Rounded(numbers, x.scales[rows], x.dtype)
    return x[rows]


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
        family = config.family
        self.qkv_bias = weights.bias(f"{attention}.qkv_proj") if family.qkv_bias else None
        self.qk_norms: tuple[Tensor, Tensor] | None = None  # of a head of q, and of k
        if family.qk_norm:
            self.qk_norms = weights.get(f"{attention}.q_norm"), weights.get(f"{attention}.k_norm")
        self.o = weights.linear(f"{prefix}.self_attn.o_proj")
        self.o_bias = weights.bias(f"{attention}.o_proj") if family.o_bias else None
        post_norm = weights.get(f"{prefix}.post_attention_layernorm")
        self.norms_after: tuple[Tensor, Tensor] | None = None  # of what attention and feed-forward add
        self.post_norm = post_norm  # of the feed-forward's input
        if family.norms_after:
            self.norms_after = post_norm, weights.get(f"{prefix}.post_feedforward_layernorm")
            self.post_norm = weights.get(f"{prefix}.pre_feedforward_layernorm")
        self.kind = LayerKind(
            config.window(index),
            max_seq_len if config.window(index) and config.local_rope_theta is not None else 0,
            weights.get(f"{attention}.sinks").float() if family.sinks else None,
        )
        self.norm_biases: tuple[Tensor | None, Tensor | None] = None, None  # of the two norms of inputs
        if family.layer_norms:
            names = f"{prefix}.input_layernorm", f"{prefix}.post_attention_layernorm"
            self.norm_biases = weights.bias(names[0]), weights.bias(names[1])
        self.mlp: Mlp | Mixture
        if family.experts is not None and config.has_experts(index):
            self.mlp = Mixture(weights, prefix, family.experts, experts, ops)
        else:
            up, down = ("gate_up_proj", "down_proj") if family.is_gated else ("c_fc", "c_proj")
            self.mlp = Mlp(weights, ops, f"{prefix}.mlp.{up}", f"{prefix}.mlp.{down}")

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
        self._n_q, self._n_kv = layout.n_heads(config), _length(layout.kv_heads(config))
        self._n_heads = self._n_q + 2 * self._n_kv
        experts = layout.experts(config)
        self.layers = [Layer(weights, i, experts, max_seq_len, ops) for i in layout.layers(config)]
        self.lm_head: Linear | None = None
        if layout.is_first_stage or (layout.is_last_stage and config.tie_word_embeddings):
            self.embedding = weights.get("model.embed_tokens")
        self._positions: Tensor | None = None  # learned ones
        if layout.is_first_stage and config.family.learned_positions:
            self._positions = weights.get("model.embed_positions")
        self._norm_bias: Tensor | None = None
        if layout.is_last_stage:
            self._norm = weights.get("model.norm")
            if config.family.layer_norms:
                self._norm_bias = weights.bias("model.norm")
            self.lm_head = Linear(self.embedding if config.tie_word_embeddings else weights.get("lm_head"))
        self.features: Features | None = None  # to keep, of each step
        self.vocabulary = layout.vocabulary(config)
        self.rotations = _rotations(config, max_seq_len).to(weights.device)
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
        if self.config.family.scales_embedding:
            scale = torch.tensor(self.config.hidden_size**0.5, dtype=x.dtype)  # rounded, as in transformers
            x.mul_(scale.item())
        return x if self._positions is None else x.add_(self._positions.index_select(0, positions))

    def forward(
        self,
        x: Tensor,
        attention: Attention,
        wanted: Tensor | None,
        layer_stored: Callable[[int], None] | None = None,
        adapters: Adapters | None = None,
    ) -> Tensor:
        """Run `x`, the step's rows (changed in place), through this stage's layers.

        The last stage returns the rows `wanted` (int64; None: all), normed. `layer_stored` is called with
        each of this stage's layers as soon as the cache has its keys and values. `adapters` change
        products of all rows: then `wanted` is None.
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
        return self.leave(x, attended, wanted, adapters)

    # The parts of `forward`: what comes before, between and after attention.

    def enter(self, x: Tensor, adapters: Adapters | None = None) -> Tensor | Unscaled:
        """Return the first layer's qkv."""
        first = self.layers[0]
        normed = self._add_norm(x, None, first.input_norm, first.norm_biases[0], first.qkv.rounds(len(x)))
        return self._qkv(0, normed, adapters)

    def between(
        self, layer: int, x: Tensor, attended: Tensor, adapters: Adapters | None = None
    ) -> Tensor | Unscaled:
        """Return the next layer's qkv; x becomes its residual."""
        delta = self._rest(layer, x, attended, adapters)
        following = self.layers[layer + 1]
        rounds = following.qkv.rounds(len(x))
        normed = self._add_norm(x, delta, following.input_norm, following.norm_biases[0], rounds)
        if self.features is not None:
            self.features.note(layer, x)
        return self._qkv(layer + 1, normed, adapters)

    def leave(
        self,
        x: Tensor,
        attended: Tensor,
        wanted: Tensor | None,
        adapters: Adapters | None = None,
        n_padded: int = 0,
    ) -> Tensor:
        """Return what `forward` does. `n_padded`: the rows that were computed, if they were more than x."""
        if self.lm_head is not None and wanted is not None:  # nothing reads the other rows
            x = self._chosen(x, wanted, n_padded or len(x))
            attended = attended.index_select(0, wanted)
        delta = self._rest(len(self.layers) - 1, x, attended, adapters)
        if self.lm_head is None:
            assert not isinstance(delta, Partial)  # ranks of several stages share no rows
            return x if delta is None else x.add_(self._ops.scaled(delta))
        last: Tensor = self._add_norm(x, delta, self._norm, self._norm_bias)
        return last

    def _add_norm(
        self,
        x: Tensor,
        delta: Tensor | Unscaled | Partial | None,
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

    def _qkv(self, layer: int, normed: Any, adapters: Adapters | None) -> Tensor | Unscaled:
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
    ) -> Tensor | Unscaled | Partial | None:
        """Run the rest of a layer after attention: return what is still to be added to x, if anything is."""
        layer = self.layers[i]
        if isinstance(layer.qkv, LatentQkv):
            attended = layer.qkv.results(attended)
        # What a product may be added to at once: a part of a sum and what is changed before are not.
        is_whole = self._groups.layout.tp_size == 1 and adapters is None
        residual = x if is_whole and layer.norms_after is None else None
        part: Tensor | Unscaled | None = None
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

    def _chosen(self, x: Tensor, rows: Tensor, n_computed: int) -> Tensor:
        """Return `rows` of the residual x, of which each rank may have its own only."""
        shared = self._groups.shared_rows
        if shared is None or not shared.splits(n_computed, x.dtype):
            return x.index_select(0, rows)
        return self._groups.all_reduce(shared.own(x, rows))

    def _by_head(self, qkv: Tensor | Unscaled) -> Tensor | Unscaled:
        if isinstance(qkv, Unscaled):
            return qkv._replace(numbers=qkv.numbers.view(-1, self._n_heads, self.config.head_dim))
        return qkv.view(-1, self._n_heads, self.config.head_dim)

    def _sum(
        self, product: Tensor | Unscaled | None, norm: Tensor | None = None
    ) -> Tensor | Unscaled | Partial | None:
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
        if shared is not None and not self.config.family.layer_norms:
            return Partial(product, shared)
        return self._groups.all_reduce(self._ops.scaled(product))

    def logits(self, normed: Tensor) -> Tensor:
        """Return this rank's columns of the logits, in the weights' dtype, from `forward`'s last stage."""
        assert self.lm_head is not None
        return self.lm_head(normed)


def _length(part: slice) -> int:
    return int(part.stop - part.start)


def _rotations(config: ModelConfig, max_seq_len: int) -> Tensor:
    """Return exp(i * position * frequency): complex64 [max_seq_len, head_dim / 2].

    Where layers with a window have a base of their own, theirs come behind: [2 * max_seq_len, head_dim / 2].
    """
    if config.family.learned_positions:
        return torch.ones(max_seq_len, config.head_dim // 2, dtype=torch.complex64)
    if (latent := config.latent) is not None:  # whose first values are not turned
        turns = _of_rope(config.rope_theta, config.rope_scaling, latent.qk_rope_head_dim, max_seq_len)
        return torch.cat([torch.ones(max_seq_len, latent.kv_lora_rank // 2) + 0j, turns], dim=1)
    plain = _of_rope(config.rope_theta, config.rope_scaling, config.head_dim, max_seq_len)
    if config.local_rope_theta is None:
        return plain
    return torch.cat([plain, _of_rope(config.local_rope_theta, RopeScaling(), config.head_dim, max_seq_len)])


def _of_rope(theta: float, scaling: RopeScaling, head_dim: int, n: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2).float() / head_dim
    frequencies = _scaled(1.0 / theta**exponents, scaling, theta)
    angles = torch.outer(torch.arange(n).float(), frequencies)
    return torch.polar(torch.full_like(angles, scaling.attention_factor), angles)


def _scaled(frequencies: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    if scaling.kind == "llama3":
        # Low frequencies are divided by the factor, high ones kept, those between blended.
        turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
        keep = (
            (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        ).clamp(0, 1)
        return frequencies * (keep + (1 - keep) / scaling.factor)
    if scaling.kind == "yarn":
        # As llama3, with the blend even over the pairs' numbers (Peng et al., YaRN, 2023).
        n, length = len(frequencies), scaling.original_max_position_embeddings

        def pair(turns: float) -> float:
            """Return which pair, from 0 to n, turns so often over the original length."""
            return n * math.log(length / (turns * 2 * math.pi)) / math.log(theta)

        low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
        if scaling.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * n - 1)
        blend = (torch.arange(n).float() - low) / (high - low if high != low else 0.001)
        keep = 1 - blend.clamp(0, 1)
        return frequencies / scaling.factor * (1 - keep) + frequencies * keep
    return frequencies / scaling.factor
