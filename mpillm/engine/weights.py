"""Where parameters come from: a checkpoint's safetensors files, or seeded random numbers. One parameter at a time, whole or a slice."""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from disagg.errors import ConfigError
from mpillm.engine.layout import ALL, Layout
from mpillm.engine.model_config import ModelConfig, checkpoint_files, load_model_config, preset_json


class WeightSource(Protocol):
    """A parameter by its Hugging Face name: these rows and columns, in the dtype of the checkpoint. Only what is asked for is read."""

    def get(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Tensor: ...


class Checkpoint:
    """The safetensors files of a folder."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        """Reads headers only; ConfigError as `check_model`."""
        self._file_of = checkpoint_files(folder, config)
        self._open: dict[Path, Any] = {}

    def get(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        file = self._file_of[name]
        try:
            if file not in self._open:
                self._open[file] = safe_open(file, framework="pt")
            whole = self._open[file].get_slice(name)
            tensor: Tensor = whole[rows] if columns == ALL else whole[rows, columns]
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{file}: tensor {name} cannot be read: {error}") from error
        return tensor


class DummyWeights:
    """Seeded random weights: a parameter depends on its name and shape alone, whatever is loaded before it or beside it.

    The scales keep the residual stream near 1 and the embedding small against it, so that greedy decoding wanders and does not repeat.
    """

    def __init__(self, config: ModelConfig, device: torch.device | str = "cpu") -> None:
        """On different kinds of devices they are different numbers."""
        self._shapes = config.tensors()
        self._dtype = getattr(torch, config.dtype)
        self._device = device

    def get(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=self._dtype, device=self._device)[rows]
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        scale = 0.1 if "embed_tokens" in name else 1 / math.sqrt(shape[1])
        return torch.randn(shape, generator=generator, device=self._device)[rows, columns].mul(scale).to(self._dtype)


class Shards:
    """A rank's parts of parameters, as the engine holds them."""

    def __init__(
        self, source: WeightSource, config: ModelConfig, layout: Layout, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self.config = config
        self.device = device
        self._source = source
        self._layout = layout
        self._dtype = dtype

    def get(self, name: str) -> Tensor:
        """This rank's part of ``name.weight``."""
        name += ".weight"
        return self._source.get(name, *self._layout.part(name, self.config)).to(self.device, self._dtype)


def save_preset(name: str, folder: Path) -> None:
    """Write a preset and its random weights as a Hugging Face folder, for any program that reads one."""
    config = load_model_config(name)
    source = DummyWeights(config)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {tensor: source.get(tensor).contiguous() for tensor in config.tensors()}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    (folder / "config.json").write_text(json.dumps(preset_json(name), indent=2) + "\n", encoding="utf-8")
