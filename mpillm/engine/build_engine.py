"""Build an engine from a checkpoint: split, fuse and cast tensors into the file that each rank maps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from disagg.errors import ConfigError
from mpillm.engine.shape.checkpoint_folder import check_disk_space, digests, new_folder, write_safetensors
from mpillm.engine.shape.dtypes import torch_dtype
from mpillm.engine.shape.engine_config import EngineConfig
from mpillm.engine.shape.engine_folder import engine_json, file_name, layouts, preset_digest
from mpillm.engine.shape.entries import Entry, is_linear, rank_entries, rank_kv_scales, scale_name
from mpillm.engine.shape.find_model import PRESETS
from mpillm.engine.shape.model_info import model_info
from mpillm.engine.weights.rank_weights import Shards
from mpillm.engine.weights.sources import Checkpoint, DummyWeights
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
    """Build the engine of a model (a folder or a preset) for TP x PP ranks, with EP inside TP groups.

    Args:
        checkpoint: Folder or preset.
        target: Folder to write; it appears only when the engine is complete.
        dtype, quantization: As the options of a run.
        build_config: Values for `config.json`, which runs of the engine read.
        progress: Receives a line for each file.

    Returns:
        The engine's `config.json`.

    Raises ConfigError as `model_info` does, if `target` exists (without `overwrite`), or if the disk has too
    little space. One matrix is in memory at a time.
    """
    target = Path(target)
    for name, size in (("tp_size", tp_size), ("pp_size", pp_size), ("ep_size", ep_size)):
        if size < 1:
            raise ConfigError(f"build: {name} {size}: must be at least 1")
    engine_config = EngineConfig(
        model_path=str(checkpoint),
        tp_size=tp_size,
        pp_size=pp_size,
        ep_size=ep_size,
        dtype=dtype,
        quantization=quantization,
    )
    info = model_info(engine_config)
    if info.folder is not None and info.folder.resolve() == target.resolve():
        raise ConfigError(f"{target}: holds the model to build from; write to another folder")
    source = DummyWeights(info.config) if info.folder is None else Checkpoint(info.folder, info.config)
    ranks = layouts(info.layout)
    formats = info.dtype, info.quantization, info.config.kv_quantization
    planned = {layout: rank_entries(info.config, layout, *formats) for layout in ranks}
    file = PRESETS / f"{checkpoint}.json" if info.folder is None else info.folder / "config.json"
    origin = {
        "checkpoint": str(checkpoint) if info.folder is None else str(info.folder.absolute()),
        "digests": [preset_digest(str(checkpoint))] if info.folder is None else digests(info.folder),
    }
    config = engine_json(
        read_object(file) | {"tie_word_embeddings": info.config.tie_word_embeddings},
        info.config,
        info.layout,
        info.dtype,
        info.quantization,
        origin,
        dict(build_config or {}),
    )
    n_bytes = sum(entry.n_bytes for entries in planned.values() for entry in entries.values())
    float_type = torch_dtype(info.dtype)
    with new_folder(target, overwrite) as work, torch.inference_mode():
        check_disk_space(work, n_bytes)
        for layout, entries in planned.items():
            shards = Shards(source, info.config, layout, float_type, quantization=info.quantization)
            tensors = _tensors(shards, entries, layout.layers(info.config))
            write_safetensors(work / file_name(layout), entries, tensors)
            if progress is not None:
                progress(f"{file_name(layout)} of {len(ranks)} ranks")
        write_json(work / "config.json", config)
    return config


def _tensors(shards: Shards, planned: Mapping[str, Entry], layers: range) -> Iterator[tuple[str, Tensor]]:
    if (kv_scales := shards.kv_scales(layers)) is not None:
        yield from zip(map(rank_kv_scales, layers), kv_scales, strict=True)
    for name in planned:
        layer, _, kind = name.rpartition(".")
        if kind == "bias":
            yield name, shards.bias(layer)
            continue
        if kind != "weight":
            continue  # scales come with their weight
        if not is_linear(name):
            yield name, shards.get(layer)
            continue
        weight, scales = shards.matrix(layer)
        yield name, weight
        if scales is not None:
            yield scale_name(name), scales
