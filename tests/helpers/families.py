"""Tiny random models of each family, as transformers writes them."""

from __future__ import annotations

import json
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
    "GptOssForCausalLM": {
        "sliding_window": 12,
        "num_local_experts": 8,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "truncate": False,
        },
    },
    "DeepseekV3ForCausalLM": {
        "num_key_value_heads": 8,
        "moe_intermediate_size": 48,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 24,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "GPT2LMHeadModel": {"n_inner": 96, "initializer_range": 0.1},
    "Gemma3ForCausalLM": {"sliding_window": 12, "num_hidden_layers": 7, "query_pre_attn_scalar": 24},
}


# Fields of `SHAPE` that a family has not.
_NOT_THERE = {
    "GPT2LMHeadModel": ("intermediate_size", "head_dim", "num_key_value_heads"),
    "DeepseekV3ForCausalLM": ("head_dim",),
}


def _config_of(name: str, **more: Any) -> Any:
    import transformers

    values = {**SHAPE, **MORE.get(name, {}), **more}
    no = _NOT_THERE.get(name, ())
    config_class = getattr(transformers, name).config_class
    return config_class(**{field: value for field, value in values.items() if field not in no})


def raw_family(name: str) -> dict[str, Any]:
    """Return the `config.json` of a tiny model of a family."""
    raw: dict[str, Any] = json.loads(_config_of(name).to_json_string(use_diff=False))
    return {field: value for field, value in raw.items() if value is not None} | {"architectures": [name]}


def make_family(name: str, folder: Path, **more: Any) -> Any:
    """Write a tiny random model of a family, and return transformers' model."""
    import torch
    import transformers

    model_class, config = getattr(transformers, name), _config_of(name, **more)
    torch.manual_seed(3)
    model = model_class(config).eval()
    with torch.no_grad():  # transformers' biases start at 0, its norms at 1: they have to count
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.add_(0.2 * torch.randn_like(buffer))
        for name, parameter in model.named_parameters():
            if name.endswith("gate_up_proj_bias"):  # a clamped activation has to clamp
                parameter.add_(5 * torch.randn_like(parameter))
            elif name.endswith("sinks"):
                parameter.copy_(2 * torch.randn_like(parameter))
            elif parameter.dim() == 1 or name.endswith("bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(2.0)
    model.save_pretrained(folder)
    return model


def pack_experts(model: Any, folder: Path) -> None:
    """Give a gpt-oss model other experts, in MXFP4, and write its folder anew with them."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    random = torch.Generator().manual_seed(7)
    tensors = load_file(folder / "model.safetensors")
    parameters = dict(model.named_parameters())
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        n, n_in, n_out = tensors.pop(name).shape
        blocks = torch.randint(256, (n, n_out, n_in // 32, 16), dtype=torch.uint8, generator=random)
        scales = torch.randint(121, 125, (n, n_out, n_in // 32), dtype=torch.uint8, generator=random)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        wide = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        parameters[name].data.copy_(wide)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
