"""Engines of the torch core: a checkpoint cut for a layout, fused and cast. Each rank maps its own file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from disagg.errors import ConfigError
from mpillm.config.core_config import CoreConfig
from mpillm.engine.dtypes import torch_dtype
from mpillm.engine.model.model_config import PRESETS
from mpillm.engine.model.model_info import ModelInfo, model_info
from mpillm.engine.parallel.layout import Layout
from mpillm.engine.weights.checkpoint_folder import check_room, digests, new_folder, write_safetensors
from mpillm.engine.weights.engine_folder import (
    EngineFolder,
    engine_json,
    file_name,
    layouts,
    preset_digest,
)
from mpillm.engine.weights.entries import Entry, held_kv_scales, is_linear, rank_entries, scale_name
from mpillm.engine.weights.parameters import Checkpoint, DummyWeights, Shards, Weights, WeightSource
from mpillm.files import read_object, write_json


def build(
    checkpoint: Path | str,
    target: Path,
    tp_size: int = 1,
    pp_size: int = 1,
    ep_size: int = 1,
    dtype: str = "auto",
    quantization: str = "auto",
    *,
    build_config: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    progress: Callable[[str], object] | None = None,
) -> dict[str, Any]:
    """Write to `target` the engine of a model (a folder or a preset) for TP x PP ranks, EP inside TP groups.

    `dtype` and `quantization` as for a run. `config.json` keeps `build_config` for runs of the engine. One
    matrix is in memory at a time, and `target` appears when it is complete. Returns its `config.json`;
    `progress` gets a line for each file. ConfigError: as `model_info`, `target` exists (without `overwrite`),
    the disk is full.
    """
    target = Path(target)
    for name, size in (("tp_size", tp_size), ("pp_size", pp_size), ("ep_size", ep_size)):
        if size < 1:
            raise ConfigError(f"build: {name} {size}: must be at least 1")
    core = CoreConfig(
        "torch",
        model_path=str(checkpoint),
        tp_size=tp_size,
        pp_size=pp_size,
        ep_size=ep_size,
        dtype=dtype,
        quantization=quantization,
    )
    info = model_info(core)
    if info.folder is not None and info.folder.resolve() == target.resolve():
        raise ConfigError(f"{target}: holds the model to build from; write to another folder")
    source = DummyWeights(info.config) if info.folder is None else Checkpoint(info.folder, info.config)
    ranks = layouts(info.layout)
    kv_quantization = info.config.kv_quantization
    planned = {
        layout: rank_entries(info.config, layout, info.dtype, info.quantization, kv_quantization)
        for layout in ranks
    }
    file = PRESETS / f"{checkpoint}.json" if info.folder is None else info.folder / "config.json"
    origin = {
        "checkpoint": str(checkpoint) if info.folder is None else str(info.folder.absolute()),
        "digests": [preset_digest(str(checkpoint))] if info.folder is None else digests(info.folder),
    }
    config = engine_json(
        read_object(file),
        info.layout,
        info.dtype,
        info.quantization,
        kv_quantization,
        origin,
        dict(build_config or {}),
    )
    with new_folder(target, overwrite) as work, torch.inference_mode():
        check_room(work, sum(entry.n_bytes for made in planned.values() for entry in made.values()))
        for layout, made in planned.items():
            shards = Shards(
                source, info.config, layout, torch_dtype(info.dtype), quantization=info.quantization
            )
            write_safetensors(work / file_name(layout), made, _held(shards, made, layout.layers(info.config)))
            if progress is not None:
                progress(f"{file_name(layout)} of {len(ranks)} ranks")
        write_json(work / "config.json", config)
    return config


def _held(shards: Shards, planned: Mapping[str, Entry], layers: range) -> Iterator[tuple[str, Tensor]]:
    if (kv_scales := shards.kv_scales(layers)) is not None:
        yield from zip(map(held_kv_scales, layers), kv_scales, strict=True)
    for name in planned:
        layer, _, kind = name.rpartition(".")
        if kind != "weight":
            continue  # scales come with their weight
        if not is_linear(name):
            yield name, shards.get(layer)
            continue
        weight, scales = shards.matrix(layer)
        yield name, weight
        if scales is not None:
            yield scale_name(name), scales


def open_weights(info: ModelInfo, layout: Layout, device: str, *, dummy: bool) -> Weights:
    """Return a rank's weights: of a built engine, of a checkpoint, or random (`dummy`, or a preset's).

    ConfigError: a file cannot be opened.
    """
    if info.engine is not None:
        return Built(info.engine, info.config, layout, device)
    source: WeightSource
    if dummy or info.folder is None:
        source = DummyWeights(info.config, device)
    else:
        source = Checkpoint(info.folder, info.config)
    return Shards(source, info.config, layout, torch_dtype(info.dtype), device, info.quantization)


class Built(Weights):
    """A rank's file of an engine, memory-mapped: bytes are read when a device or a computation needs them."""

    def __init__(self, engine: EngineFolder, config: Any, layout: Layout, device: torch.device | str) -> None:
        """Raise ConfigError if the file cannot be opened; `check_engine` has checked its content."""
        super().__init__(config, torch_dtype(engine.dtype), device)
        self._path = engine.file(layout)
        try:
            self._file = safe_open(self._path, framework="pt", device=str(device))
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{self._path}: cannot be read: {error}") from error

    def get(self, name: str) -> Tensor:
        return self._tensor(f"{name}.weight")

    def matrix(self, name: str) -> tuple[Tensor, Tensor | None]:
        weight = self._tensor(f"{name}.weight")
        return weight, None if weight.dtype == self.dtype else self._tensor(scale_name(f"{name}.weight"))

    def kv_scales(self, layers: range) -> Tensor | None:
        if self.config.kv_quantization == "none":
            return None
        return torch.stack([self._tensor(held_kv_scales(layer)) for layer in layers])

    def _tensor(self, name: str) -> Tensor:
        try:
            tensor: Tensor = self._file.get_tensor(name)  # type: ignore[no-untyped-call]
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{self._path}: tensor {name} cannot be read: {error}") from error
        return tensor
