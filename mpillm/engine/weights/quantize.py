"""Quantize a whole checkpoint with one matrix in memory at a time.

Rounding is symmetric, to the nearest value. The scale of a row is its largest absolute value divided by the
type's maximum (llm-compressor's min-max observer gives the same). Weights need no calibration data; an fp8 KV
cache may use some (see `calibrate`). `quantization` has the formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from disagg.errors import ConfigError
from mpillm.engine.shape.checkpoint_folder import (
    check_disk_space,
    checkpoint_files,
    copy_companions,
    digests,
    new_folder,
    write_safetensors,
)
from mpillm.engine.shape.checkpoint_forms import form_of
from mpillm.engine.shape.entries import Entry, is_linear, scale_name, stored
from mpillm.engine.shape.model_config import ModelConfig
from mpillm.engine.shape.quantization import ALGORITHMS, RECORD, check_algorithm, quantization_config
from mpillm.engine.shape.read_config import load_model_config
from mpillm.engine.shape.tensor_shapes import tensor_shapes
from mpillm.engine.shape.weight_files import INDEX, SINGLE, read_header
from mpillm.engine.tensors.rounding import dequantize_rows, quantize_rows
from mpillm.files import read_object, write_json
from mpillm.telemetry.read_log import ReadLog


def quantize(
    source: Path,
    target: Path,
    algo: str,
    *,
    kv_scales: Mapping[str, Tensor] | None = None,
    overwrite: bool = False,
    progress: Callable[[str], object] | None = None,
) -> dict[str, Any]:
    """Write the Hugging Face folder `source` to `target`, linear layers in `algo`: int8, fp8, none (a copy).

    Files keep their names, other tensors their type. `target` appears when it is complete.

    Args:
        kv_scales: Scales of an fp8 KV cache (see `calibrate`), which `target`'s configuration then has.
        progress: Receives a line for each file.

    Returns: The content of `quantization.json`: bytes before and after, and each matrix's relative error
        (Frobenius norms).
    Raises: ConfigError if `source` is not a supported model or is already quantized, `target` exists (without
        `overwrite`), or the disk is full.
    """
    check_algorithm("quantize: algorithm", algo, ("none", *ALGORITHMS))
    source, target = Path(source), Path(target)
    model = load_model_config(str(source))
    if not source.is_dir():
        raise ConfigError(f"{source}: not the folder of a model")
    has = model.quantization if model.stored not in ("blocks", "mxfp4") else model.stored
    if has != "none" and (algo != "none" or kv_scales):
        do = "quantise" if algo != "none" else "calibrate"
        raise ConfigError(f"{source}: its weights are {has} already; {do} the model that it was made from")
    if model.kv_quantization != "none" and kv_scales:
        raise ConfigError(f"{source}: it has scales for the KV cache already")
    if algo != "none" and form_of(model) is not None:
        raise ConfigError(
            f"{source}: its tensors hold several matrices or turned ones, which only --quantization of a run"
            " rounds"
        )
    if source.resolve() == target.resolve():
        raise ConfigError(f"{target}: holds the model to quantise; write to another folder")
    files = sorted(set(checkpoint_files(source, model).values()))
    added = dict(kv_scales or {})
    entries = {file: _entries(file, algo, model) for file in files}
    entries[files[0]] |= {name: Entry("F32", tuple(scale.shape)) for name, scale in added.items()}
    n_bytes = sum(entry.n_bytes for planned in entries.values() for entry in planned.values())
    record: dict[str, Any] = {
        "algorithm": algo,
        "source": str(source.absolute()),
        "source_digests": digests(source),
        "bytes": {"source": sum(file.stat().st_size for file in files), "weights": n_bytes},
        "relative_errors": {},
    }
    with new_folder(target, overwrite) as work:
        check_disk_space(work, n_bytes)
        for i, file in enumerate(files):
            more = added.items() if file == files[0] else ()
            tensors = chain(_quantized(file, algo, model, record["relative_errors"]), more)
            write_safetensors(work / file.name, entries[file], tensors)
            if progress is not None:
                progress(f"{file.name}: {i + 1} of {len(files)} files")
        if files != [source / SINGLE]:
            weight_map = {name: file.name for file, planned in entries.items() for name in planned}
            write_json(work / INDEX, {"metadata": {"total_size": n_bytes}, "weight_map": weight_map})
        config = read_object(source / "config.json")
        kv_algorithm = "fp8" if added else model.kv_quantization
        if algo != "none" or added:
            config["quantization_config"] = quantization_config(algo, model.router, kv_algorithm)
        write_json(work / "config.json", config)
        copy_companions(source, work)
        write_json(work / RECORD, record)
    return record


def _entries(file: Path, algo: str, model: ModelConfig) -> dict[str, Entry]:
    known, entries = tensor_shapes(model), dict[str, Entry]()
    for name, entry in read_header(file).items():
        is_rounded = algo != "none" and name in known and is_linear(name)
        entries |= stored(name, entry.shape, model.dtype, algo) if is_rounded else {name: entry}
    return entries


def _quantized(
    file: Path, algo: str, model: ModelConfig, errors: dict[str, float]
) -> Iterator[tuple[str, Tensor]]:
    known = tensor_shapes(model)
    ReadLog().note(file)
    try:
        with safe_open(file, framework="pt") as stream:
            for name in stream.keys():  # noqa: SIM118 - not a dict
                tensor = stream.get_tensor(name)
                if algo == "none" or name not in known or not is_linear(name):
                    yield name, tensor
                    continue
                numbers, scales = quantize_rows(tensor, algo)
                if not torch.isfinite(scales).all():
                    raise ConfigError(f"{file}: tensor {name} has values that are not finite")
                exact = tensor.float()
                error = (dequantize_rows(numbers, scales, torch.float32) - exact).norm()
                errors[name] = float(f"{float(error / exact.norm().clamp(min=1e-30)):.4g}")
                yield name, numbers
                yield scale_name(name), scales
    except SafetensorError as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
