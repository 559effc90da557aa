"""Tiny random models of each family, as transformers writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 319,
}


# What each family has besides: windows shorter than prompts, and its own parts.
MORE: dict[str, dict[str, Any]] = {
    "MistralForCausalLM": {"sliding_window": 12},
    "Qwen2ForCausalLM": {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
    "Qwen3MoeForCausalLM": {
        "moe_intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
    },
}


def make_family(name: str, folder: Path, **more: Any) -> Any:
    """Write a tiny random model of a family, and return transformers' model."""
    import torch
    import transformers

    model_class = getattr(transformers, name)
    config = model_class.config_class(**{**SHAPE, **MORE.get(name, {}), **more})
    torch.manual_seed(3)
    model = model_class(config).eval()
    with torch.no_grad():  # transformers' biases start at 0, its norms at 1: they have to count
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(2.0)
    model.save_pretrained(folder)
    return model
