"""The parts that a family's file composes a model of: pure data.

`tensor_shapes` derives the names and shapes of tensors from the composition, and `model.torch_parts` builds
the products and norms. A part has the name of its tensors in a checkpoint, without the layer's prefix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

# Projections with the same input are one matrix in the engine, with their outputs concatenated.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13": ("w1", "w3"),
}
CORRECTION = "e_score_correction_bias"  # of a router: float32, whatever the checkpoint's type
Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]  # see `ops.gated`
# Constants of clamped_swiglu: the largest value, and the factor of the sigmoid's input.
CLAMP, SWISH = 7.0, 1.702


class Latent(NamedTuple):
    """Sizes of latent attention, by their names in `config.json`."""

    q_lora_rank: int  # 0: queries come from one product
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def head_dim(self) -> int:
        """Number of values of a token in the cache, and of a query."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def query_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True)
class Embedding:
    """The token embedding."""

    is_scaled: bool = False  # by the square root of hidden_size
    has_positions: bool = False  # learned positions are added, instead of rotations


@dataclass(frozen=True)
class RmsNorm:
    """x / rms(x) * weight (Zhang and Sennrich, 2019)."""

    name: str


@dataclass(frozen=True)
class LayerNorm:
    """(x - mean(x)) / deviation(x) * weight + bias."""

    name: str


@dataclass(frozen=True)
class GroupedQueryAttention:
    """Softmax attention whose query heads share key and value heads (Ainslie et al., 2023)."""

    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False  # an RMS norm of each head of q and k, before the rotation
    window: int = 0  # tokens that a token attends to, itself included; 0: all tokens before it
    local_rope: bool = False  # rotations use the base of layers with a window
    sinks: bool = False  # each head's softmax has one more score, which adds no value


@dataclass(frozen=True)
class LatentAttention:
    """Attention whose heads share one latent vector per token (DeepSeek-AI, DeepSeek-V2, 2024)."""

    sizes: Latent


@dataclass(frozen=True)
class GatedFeedForward:
    """down(activation(gate(x)) * up(x)) (Shazeer, GLU Variants, 2020)."""

    size: int
    activation: Activation = "silu"
    prefix: str = "mlp"


@dataclass(frozen=True)
class PlainFeedForward:
    """c_proj(gelu(c_fc(x))), both products with a bias."""

    size: int
    prefix: str = "mlp"


@dataclass(frozen=True)
class ExpertGroups:
    """Experts in groups: a row chooses from its best groups, by sigmoids and a bias (DeepSeek-V3, 2024)."""

    n_groups: int
    n_chosen: int  # groups
    factor: float  # of the output of the chosen experts
    shared_size: int  # of the shared expert, which every row uses


@dataclass(frozen=True)
class Mixture:
    """The weighted sum of each row's best experts (Shazeer et al., 2017): each a gated feed-forward."""

    n_experts: int
    n_chosen: int
    size: int  # of an expert
    prefix: str = "mlp"
    router: str = "gate"
    gate_up: str = "gate_up_proj"  # a key of `FUSED`
    down: str = "down_proj"
    activation: Activation = "silu"
    bias: bool = False  # of the router and of each expert's products
    weights_add_up: bool = True  # the weights of a row's experts add up to 1
    groups: ExpertGroups | None = None


Norm = RmsNorm | LayerNorm
AnyAttention = GroupedQueryAttention | LatentAttention
AnyFeedForward = GatedFeedForward | PlainFeedForward | Mixture


@dataclass(frozen=True)
class PreNorm:
    """x += attention(norm(x)), then x += feed_forward(post_norm(x))."""

    norm: Norm
    attention: AnyAttention
    post_norm: Norm
    feed_forward: AnyFeedForward


@dataclass(frozen=True)
class SandwichNorm:
    """x += attention_norm(attention(norm(x))), then x += after_norm(feed_forward(post_norm(x)))."""

    norm: RmsNorm
    attention: AnyAttention
    attention_norm: RmsNorm
    post_norm: RmsNorm
    feed_forward: AnyFeedForward
    after_norm: RmsNorm


AnyLayer = PreNorm | SandwichNorm
