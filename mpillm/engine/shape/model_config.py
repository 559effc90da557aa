"""The shape of a model, without torch and without its weights; `read_config` reads it from `config.json`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mpillm.engine.shape.composition import AnyLayer, Embedding, Latent, Mixture, Norm, RmsNorm
from mpillm.engine.shape.config_fields import FamilyFields
from mpillm.engine.shape.dtypes import N_BYTES
from mpillm.engine.shape.quantization import Stored

Form = Literal["parameters", "gpt2", "packed experts"]


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are scaled for contexts longer than the model was first trained for."""

    kind: str = "default"  # default, linear, llama3 or yarn
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # of queries and keys


class Family(NamedTuple):
    """A model family: the fields of its `config.json`, and the composition of its model."""

    name: str  # in `architectures` of config.json
    model_type: str  # of config.json: transformers chooses the class by it
    title: str  # in the documentation
    fields: FamilyFields
    layer: Callable[[ModelConfig, int], AnyLayer]
    embedding: Embedding = Embedding()
    norm: Norm = RmsNorm("model.norm")  # of the last layer's output
    checkpoint: Form = "parameters"  # how files store parameters: see `checkpoint_forms`
    norms_less_one: bool = False  # the weights of norms are stored minus 1

    def __repr__(self) -> str:
        """Return a text that is equal in each process: servers compare models by it."""
        return f"Family({self.name!r})"


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model: the fields of `config.json` that its tokens depend on."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    tie_word_embeddings: bool
    dtype: str  # of the checkpoint: float32, bfloat16 or float16
    family: Family
    windows: tuple[int, ...] = ()  # tokens that a token sees, by layer (0: all); empty: all layers see all
    local_rope_theta: float | None = None  # of layers with a window, if it is not `rope_theta`
    query_scalar: float | None = None  # scores are divided by its square root; None: head_dim
    n_experts: int = 0  # 0: dense
    n_experts_per_token: int = 0
    norms_choice: bool = True  # the weights of a row's experts add up to 1
    groups: tuple[int, int] = (1, 1)  # of experts, and how many of them a row chooses from
    routed_factor: float = 1.0  # of the chosen experts' output
    n_dense_layers: int = 0  # the first ones, without experts
    dense_size: int = 0  # of these layers' feed-forward
    shared_size: int = 0  # of the expert that each row has
    latent: Latent | None = None
    score_factor: float = 1.0  # of latent attention's scores, besides the root of a query's size
    n_draft_layers: int = 0  # draft layers after the last one (see `mtp_config`)
    quantization: str = "none"  # of the checkpoint: none, int8, fp8 or int4
    kv_quantization: str = "none"  # fp8: the checkpoint has scales for the KV cache
    stored: Stored = "rows"  # which numbers share a scale in the checkpoint
    group: int = 0  # int4: inputs that share a scale; -1: all

    def layer(self, index: int) -> AnyLayer:
        """Return the composition of a layer."""
        return self.family.layer(self, index)

    @property
    def router(self) -> str | None:
        """The name of the router in the last layer; None: the model is dense."""
        mixture = self.layer(self.n_layers - 1).feed_forward
        return f"{mixture.prefix}.{mixture.router}" if isinstance(mixture, Mixture) else None

    def window(self, layer: int) -> int:
        """Return how many tokens a token of the layer sees, itself included; 0: all."""
        return self.windows[layer] if self.windows else 0

    @property
    def widest_window(self) -> int:
        """How many tokens a token sees at most in any layer; 0: all."""
        return max(self.windows) if self.windows and all(self.windows) else 0

    @property
    def partial_window(self) -> int:
        """The widest window, where some layers have one and others see all tokens; otherwise 0."""
        return max(self.windows) if any(self.windows) and not all(self.windows) else 0

    def kv_layers(self, pp_size: int, *, windowed: bool) -> int:
        """Return how many layers with a window, or without one, a stage has at most."""
        starts = [self.n_layers * stage // pp_size for stage in range(pp_size + 1)]
        stages = (range(*ends) for ends in itertools.pairwise(starts))
        return max(sum((self.window(layer) > 0) == windowed for layer in stage) for stage in stages)

    @property
    def kv_parts(self) -> int:
        """The vectors per token and head in the cache: a key and a value, or a latent, which is both."""
        return 2 if self.latent is None else 1

    def kv_bytes_per_token(self, dtype: str, tp_size: int = 1, pp_size: int = 1) -> int:
        """Return a token's bytes in a cache of `dtype` (float32, bfloat16, fp8) on the rank with the most."""
        layers, heads = -(-self.n_layers // pp_size), max(1, self.n_kv_heads // tp_size)
        return self.kv_parts * layers * heads * self.head_dim * N_BYTES[dtype]
