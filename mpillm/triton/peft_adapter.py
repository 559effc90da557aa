"""Convert a PEFT adapter to the tensors of requests; `engine.extras.lora` describes their layout."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file

from disagg.errors import ConfigError
from mpillm.engine.extras.lora import MODULES
from mpillm.files import LFS_POINTER, check_files, excerpt, lfs_hint

_MODULE_OF = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "qkv_proj": "attn_qkv",
    "o_proj": "attn_dense",
    "gate_proj": "mlp_h_to_4h",
    "up_proj": "mlp_gate",
    "down_proj": "mlp_4h_to_h",
}
_NAME = re.compile(r".*\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)\.lora_([AB])(?:\.\w+)?\.weight")
# Settings that change an adapter's result and that the tensors cannot express, with the supported values.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "modules_to_save": (None, []),
    "bias": (None, "none"),
}


def convert(folder: Path, dtype: str) -> tuple[NDArray[Any], NDArray[np.int32]]:
    """Return weights [1, modules, width] and config [1, modules, 3] of an adapter's folder.

    `dtype`: float16 or float32, of the weights. Raises ConfigError if the tensors cannot express the adapter.
    """
    if folder.is_dir():
        check_files(folder)
    try:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        tensors = _tensors(folder)
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
        if rank < 1 or not math.isfinite(alpha):
            raise ValueError(f"r {rank}, lora_alpha {alpha}")
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{error.filename or folder}: cannot be read: {error.strerror or error}") from error
    except (ArithmeticError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{folder}: not a readable PEFT adapter ({reason})") from error
    for name, neutral in _NEUTRAL.items():
        if config.get(name) not in neutral:
            raise ConfigError(
                f"{folder}/adapter_config.json: {name} {excerpt(config[name])} can't be converted"
            )
    parts: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None or match[2] not in _MODULE_OF:
            raise ConfigError(f"{folder}: tensor {name} is not of a module that can be converted")
        parts.setdefault((int(match[1]), match[2]), {})[match[3]] = tensor.float()
    rows, heads = [], []
    for (layer, module), pair in sorted(parts.items()):
        if set(pair) != {"A", "B"}:
            raise ConfigError(f"{folder}: layer {layer}, {module}: lora_A or lora_B is missing")
        rows.append(torch.cat([pair["A"].flatten(), (pair["B"] * scale).flatten()]).numpy())
        heads.append([MODULES[_MODULE_OF[module]], layer, len(pair["A"])])
    if not rows:
        raise ConfigError(f"{folder}: the adapter is empty")
    weights = np.zeros((1, len(rows), max(map(len, rows))), dtype)
    for padded, row in zip(weights[0], rows, strict=True):
        padded[: len(row)] = row
    return weights, np.array([heads], np.int32)


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    if (path := folder / "adapter_model.safetensors").is_file():
        _check_pointer(path)
        return load_file(path)
    _check_pointer(path := folder / "adapter_model.bin")
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # noqa: BLE001 - a damaged pickle raises any; its text recommends unsafe loading
        tensors = None
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in tensors.items()
    ):
        raise ConfigError(f"{path}: damaged, or not PyTorch's file of tensors")
    return tensors


def _check_pointer(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise ConfigError(f"{path}: {lfs_hint(path.parent)}")
