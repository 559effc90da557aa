"""Presets as folders of models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from mpillm.engine.shape.find_model import PRESETS
from mpillm.engine.shape.read_config import load_model_config
from mpillm.engine.shape.tensor_shapes import tensor_shapes
from mpillm.engine.weights.sources import DummyWeights
from mpillm.files import read_object


def preset_json(name: str) -> dict[str, Any]:
    """Return a preset's `config.json`, parsed."""
    return read_object(PRESETS / f"{name}.json")


def save_preset(name: str, folder: Path) -> None:
    """Write a preset and its random weights as a Hugging Face folder, for any program that reads one."""
    config = load_model_config(name)
    source = DummyWeights(config)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {tensor: source.get(tensor).contiguous() for tensor in tensor_shapes(config)},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps(preset_json(name), indent=2) + "\n", encoding="utf-8")
