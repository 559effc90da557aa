"""Engines of the torch core: a checkpoint cut for a layout, fused and cast, so that each rank maps its own file and computes from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from disagg.errors import ConfigError
from mpillm.cores.base import CoreConfig
from mpillm.engine.checkpoint_folder import Entry, check_room, digests, new_folder, write_safetensors
from mpillm.engine.engine_folder import EngineFolder, engine_json, entries, file_name, layouts, preset_digest
from mpillm.engine.layout import Layout
from mpillm.engine.model_config import PRESETS, model_info
from mpillm.engine.quantization import is_linear, scale_name
from mpillm.engine.weights import Checkpoint, DummyWeights, Shards, Weights
from mpillm.json_files import read_object, write_json

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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
    """Write to `target` the engine of a model (a folder, or a preset's name) for an instance of TP x PP ranks, EP inside the TP groups.

    `dtype` and `quantization` as of a run. `build_config` is kept in `config.json` for who runs the engine. One matrix is in memory at a
    time, and `target` appears when it is complete. Gives its `config.json`; `progress` gets a line for each file. ConfigError: as
    `model_info`, `target` is there (without `overwrite`), the disk is full.
    """
    target = Path(target)
    for name, size in (("tp_size", tp_size), ("pp_size", pp_size), ("ep_size", ep_size)):
        if size < 1:
            raise ConfigError(f"build: {name} {size}: at least 1 is needed")
    core = CoreConfig(
        "torch", model_path=str(checkpoint), tp_size=tp_size, pp_size=pp_size, ep_size=ep_size, dtype=dtype, quantization=quantization
    )
    info = model_info(core)
    if info.folder is not None and info.folder.resolve() == target.resolve():
        raise ConfigError(f"{target}: the model to build from is there; write to another folder")
    source = DummyWeights(info.config) if info.folder is None else Checkpoint(info.folder, info.config)
    ranks = layouts(info.layout)
    planned = {layout: entries(info.config, layout, info.dtype, info.quantization) for layout in ranks}
    file = PRESETS / f"{checkpoint}.json" if info.folder is None else info.folder / "config.json"
    origin = {
        "checkpoint": str(checkpoint) if info.folder is None else str(info.folder.absolute()),
        "digests": [preset_digest(str(checkpoint))] if info.folder is None else digests(info.folder),
    }
    config = engine_json(read_object(file), info.layout, info.dtype, info.quantization, origin, dict(build_config or {}))
    with new_folder(target, overwrite) as work, torch.inference_mode():
        check_room(work, sum(entry.n_bytes for made in planned.values() for entry in made.values()))
        for layout, made in planned.items():
            shards = Shards(source, info.config, layout, TORCH_DTYPES[info.dtype], quantization=info.quantization)
            write_safetensors(work / file_name(layout), made, _held(shards, made))
            if progress is not None:
                progress(f"{file_name(layout)} of {len(ranks)} ranks")
        write_json(work / "config.json", config)
    return config


def _held(shards: Shards, planned: Mapping[str, Entry]) -> Iterator[tuple[str, Tensor]]:
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


class Built(Weights):
    """A rank's file of an engine, memory-mapped: a tensor's bytes are read when the device gets them, or a CPU computes with them."""

    def __init__(self, engine: EngineFolder, config: Any, layout: Layout, device: torch.device | str) -> None:
        """ConfigError if the file cannot be opened; `check_engine` has seen what is in it."""
        super().__init__(config, TORCH_DTYPES[engine.dtype], device)
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

    def _tensor(self, name: str) -> Tensor:
        try:
            tensor: Tensor = self._file.get_tensor(name)  # type: ignore[no-untyped-call]
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{self._path}: tensor {name} cannot be read: {error}") from error
        return tensor
