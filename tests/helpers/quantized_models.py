"""What tests of quantised models share: the same model in floats, for transformers to answer with."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def dequantized(folder: Path, target: Path) -> Path:
    """Write `folder`'s model with its weights multiplied out, as a model of floats, to `target`."""
    target.mkdir()
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    tensors = {
        name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    scales = {
        name.removesuffix("_scale"): tensors.pop(name)
        for name in [name for name in tensors if name.endswith("_scale")]
    }
    assert scales
    floats = {name: tensor.to(torch.float32) * scales.get(name, 1) for name, tensor in tensors.items()}
    save_file(floats, target / "model.safetensors", metadata={"format": "pt"})
    return target
