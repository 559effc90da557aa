"""Checkpoints that have scales for a KV cache in fp8."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from mpillm.engine.shape.quantization import quantization_config
from tests.helpers.presets import save_preset

N_LAYERS, N_KV_HEADS = 6, 4  # of tiny-llama


def with_scales(folder: Path, scales: dict[str, torch.Tensor], **scheme: Any) -> Path:
    """Write tiny-llama as a checkpoint that says that its KV cache is in fp8."""
    save_preset("tiny-llama", folder)
    save_file(
        load_file(folder / "model.safetensors") | scales,
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization_config("none", None, "fp8")
    config["quantization_config"]["kv_cache_scheme"] |= scheme
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def scales_of_heads(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a scale for each KV head, small enough that some keys and values are cut off."""
    random = torch.Generator().manual_seed(seed)
    names = [f"model.layers.{layer}.self_attn.{kind}_scale" for layer in range(N_LAYERS) for kind in "kv"]
    return {name: torch.rand(N_KV_HEADS, generator=random) / 100 + 0.002 for name in names}
