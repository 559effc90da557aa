"""Which weights a quantised model has, and how `config.json` says so: no torch here, and no arithmetic (see `quantize`).

The matrices of a layer's linear projections are 8 bits wide, each with one scale per output channel (a row of the matrix): a weight is
the number times its row's scale. Embedding, norms, router and `lm_head` stay as they were. On disk that is the format of
compressed-tensors (https://github.com/vllm-project/compressed-tensors: `int-quantized` and `float-quantized`, strategy `channel`), which
transformers, vLLM and llm-compressor read and write: `X.weight` [out, in] as int8 or float8_e4m3fn, `X.weight_scale` [out, 1].
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError, nearest

ALGORITHMS = ("int8", "fp8")
DTYPES = {"int8": "I8", "fp8": "F8_E4M3"}  # safetensors' names
RECORD = "quantization.json"  # of a folder that `quantize` made: what was done, and the relative error of each matrix
SCALE_BYTES = 4  # float32, as the engine holds a scale
_TYPES = {"int": "int8", "float": "fp8"}
_FORMATS = {"int8": "int-quantized", "fp8": "float-quantized"}
_LINEARS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
_LINEARS |= {"qkv_proj", "gate_up_proj", "w13"}  # as the engine has them


def is_linear(name: str) -> bool:
    """Whether the parameter `name` is a linear projection of a layer, which a quantised model holds in 8 bits."""
    layer, _, kind = name.rpartition(".")
    return kind == "weight" and layer.rpartition(".")[2] in _LINEARS


def scale_name(name: str) -> str:
    """Of the scales of a parameter ``….weight``."""
    return f"{name}_scale"


def held(quantization: str, on_gpu: bool) -> str:
    """What such weights are in the engine's memory: fp8 weights are floats on a CPU (see `linear`)."""
    return "none" if quantization == "fp8" and not on_gpu else quantization


def check_algorithm(source: str, algorithm: str, allowed: tuple[str, ...]) -> None:
    """ConfigError naming `source` (an option, as a rule) unless `algorithm` is one of `allowed`."""
    if algorithm not in allowed:
        raise ConfigError(f"{source} {algorithm}: not one of {', '.join(allowed)}{nearest(algorithm, allowed)}")


def quantization_config(algorithm: str, n_experts: int) -> dict[str, Any]:
    """What `config.json` says of a model quantised by `algorithm`.

    fp8 is for products of 8-bit weights with activations that are quantised as they come, token by token (llm-compressor's FP8_DYNAMIC);
    int8 is for weights alone.
    """
    number = {"num_bits": 8, "type": "int" if algorithm == "int8" else "float", "symmetric": True}
    activations = {**number, "strategy": "token", "dynamic": True} if algorithm == "fp8" else None
    group = {
        "targets": ["Linear"],
        "weights": {**number, "strategy": "channel", "dynamic": False},
        "input_activations": activations,
        "format": _FORMATS[algorithm],  # without it, int8 weights alone would be looked for packed into int32
    }
    return {
        "quant_method": "compressed-tensors",
        "format": _FORMATS[algorithm],
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", *(["re:.*block_sparse_moe[.]gate$"] if n_experts else [])],
        "kv_cache_scheme": None,
    }


def parse_quantization(raw: dict[str, Any], source: Path) -> str:
    """The algorithm that `config.json`'s `quantization_config` names, "none" without one; ConfigError if we cannot run it."""
    config = raw.get("quantization_config")
    if config is None:
        return "none"

    def refuse(what: str, value: Any, supported: str) -> ConfigError:
        return ConfigError(
            f"{source}: quantization_config: {what} {json.dumps(value)} is not supported by the torch core; supported: {supported}"
        )

    if not isinstance(config, dict) or config.get("quant_method") != "compressed-tensors":
        raise refuse("quant_method", config.get("quant_method") if isinstance(config, dict) else config, "compressed-tensors")
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1 or not all(isinstance(group, dict) for group in groups.values()):
        raise refuse("config_groups", groups, "one group")
    group = next(iter(groups.values()))
    weights = group.get("weights") or {}
    for name, value, allowed in (
        ("format", config.get("format"), tuple(_FORMATS.values())),
        ("kv_cache_scheme", config.get("kv_cache_scheme"), (None,)),
        ("targets", group.get("targets"), (["Linear"],)),
        ("weights.num_bits", weights.get("num_bits"), (8,)),
        ("weights.type", weights.get("type"), tuple(_TYPES)),
        ("weights.strategy", weights.get("strategy"), ("channel",)),
        ("weights.symmetric", weights.get("symmetric", True), (True,)),
        ("weights.dynamic", weights.get("dynamic", False), (False,)),
    ):
        if value not in allowed:
            raise refuse(name, value, ", ".join(map(json.dumps, allowed)))
    if "lm_head" not in (config.get("ignore") or ()):
        raise refuse("ignore", config.get("ignore"), 'a list with "lm_head" in it')
    return _TYPES[weights["type"]]
