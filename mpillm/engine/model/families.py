"""The model families of the torch core: what each has besides Llama's layer, by its name in `config.json`.

Everything else is Llama's (`transformer`): RMS norms, rotary embeddings of pairs, grouped heads, SwiGLU, or a
mixture of it where `config.json` has experts. A new family of these parts is one line of `FAMILIES`.
"""

from __future__ import annotations

from typing import NamedTuple


class Family(NamedTuple):
    """How a family differs from Llama."""

    qkv_bias: bool = False  # q, k and v are products with a bias
    qk_norm: bool = False  # each head of q and k has an RMS norm, before the rotation
    # Tokens see the last `sliding_window` only, unless config.json says that they don't: runs longer than
    # that are refused.
    may_slide: bool = False
    has_experts: bool = False  # Mixtral's mixture, with its names
    head_dim: int | None = None  # where config.json has none; None: hidden_size / num_attention_heads


FAMILIES = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(may_slide=True),
    "MixtralForCausalLM": Family(may_slide=True, has_experts=True),
    "Qwen2ForCausalLM": Family(qkv_bias=True, may_slide=True),
    "Qwen3ForCausalLM": Family(qk_norm=True, may_slide=True, head_dim=128),
}
