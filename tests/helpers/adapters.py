"""LoRA adapters in PEFT's files, and PEFT, which says what a model with one must answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

ALPHA, RANK = 16, 4  # a scale that costs a float16 nothing
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(model: Path, folder: Path, seed: int, modules: tuple[str, ...] = ALL) -> None:
    """Write a random adapter for a Llama, as `PeftModel.save_pretrained` does."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if name.split(".")[-2] in modules:
            n_out, n_in = weight.shape
            key = f"base_model.model.{name.removesuffix('.weight')}"
            for part, shape in (("A", (RANK, n_in)), ("B", (n_out, RANK))):
                values = torch.randn(shape, generator=generator) * n_in**-0.5
                # What a float16 can hold, so that nothing is lost on the way through a request.
                tensors[f"{key}.lora_{part}.weight"] = values.half().float()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "target_modules": [*modules]}))


def with_adapter(model: Any, folder: Path) -> Any:
    """Return PEFT's model of a transformers model with the adapter, which computes it beside the weights."""
    return pytest.importorskip("peft").PeftModel.from_pretrained(model, folder).eval()
