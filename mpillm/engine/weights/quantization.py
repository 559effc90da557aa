"""What quantised weights are, and how `config.json` says so. Without torch; `quantize` has the arithmetic.

The matrices of a layer's linear projections have 8 bits, with one scale per output channel (a row of the
matrix): a weight is the number times its row's scale. Embedding, norms, router and `lm_head` keep their type.
On disk that is the format of compressed-tensors (https://github.com/vllm-project/compressed-tensors:
`int-quantized` and `float-quantized`, strategy `channel`), which transformers, vLLM and llm-compressor read
and write: `X.weight` [out, in] as int8 or float8_e4m3fn, `X.weight_scale` [out, 1].

A KV cache may be fp8 too. A checkpoint that says so (`kv_cache_scheme`) has one scale for the keys and one
for the values of each layer, or of each KV head: a number in the cache times its scale is the key or value.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from disagg.errors import ConfigError, nearest
from mpillm.engine.model.families import Experts, Raw

ALGORITHMS = ("int8", "fp8")
RECORD = "quantization.json"  # in a folder that `quantize` made: what was done, each matrix's relative error
_TYPES = {"int": "int8", "float": "fp8"}
_DENSE = "dense"  # compressed-tensors' word for weights that are floats
_FORMATS = {"int8": "int-quantized", "fp8": "float-quantized"}


# What a scale in a checkpoint is of: a matrix's row, or 32 numbers of four bits (see `packed_experts`).
Stored = Literal["rows", "mxfp4"]


def held(quantization: str, on_gpu: bool) -> str:
    """Return the weights' type in the engine's memory: on a CPU fp8 weights are floats (see `linear`)."""
    return "none" if quantization == "fp8" and not on_gpu else quantization


def check_algorithm(source: str, algorithm: str, allowed: tuple[str, ...]) -> None:
    """Raise ConfigError naming `source` (an option, as a rule) unless `algorithm` is one of `allowed`."""
    if algorithm not in allowed:
        raise ConfigError(
            f"{source} {algorithm}: not one of {', '.join(allowed)}{nearest(algorithm, allowed)}"
        )


def quantization_config(
    algorithm: str, experts: Experts | None, kv_algorithm: str = "none"
) -> dict[str, Any]:
    """Return `config.json`'s entry for `algorithm` and the cache's `kv_algorithm`: none (the model's) or fp8.

    `experts`: the model's, whose router stays as it is.

    fp8 multiplies 8-bit weights with activations that are quantised token by token at run time
    (llm-compressor's FP8_DYNAMIC); int8 quantises only weights.
    """
    scheme = (
        {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
        if kv_algorithm == "fp8"
        else None
    )
    common = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "kv_cache_scheme": scheme,
    }
    if algorithm == "none":
        return {**common, "format": _DENSE, "config_groups": {}, "ignore": []}
    number = {"num_bits": 8, "type": "int" if algorithm == "int8" else "float", "symmetric": True}
    activations = {**number, "strategy": "token", "dynamic": True} if algorithm == "fp8" else None
    group = {
        "targets": ["Linear"],
        "weights": {**number, "strategy": "channel", "dynamic": False},
        "input_activations": activations,
        "format": _FORMATS[algorithm],  # without it, int8 weights alone would be looked for packed into int32
    }
    return {
        **common,
        "format": _FORMATS[algorithm],
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", *([f"re:.*{experts.prefix}[.]{experts.router}$"] if experts else [])],
    }


class Quantized(NamedTuple):
    """What is quantised in a checkpoint."""

    weights: str = "none"  # or int8 or fp8: what the engine computes with
    kv_cache: str = "none"  # or fp8
    stored: Stored = "rows"


def parse_quantization(raw: Raw, source: Path, experts: Experts | None) -> Quantized:
    """Return what `quantization_config` says. `experts`: the family's.

    Raises ConfigError if we cannot run it.
    """
    config = raw.get("quantization_config")
    if config is None:
        return Quantized()
    if isinstance(config, dict) and config.get("quant_method") == "mxfp4" and experts and experts.packed:
        return Quantized(stored="mxfp4")

    def refuse(what: str, value: Any, supported: str) -> ConfigError:
        return ConfigError(
            f"{source}: quantization_config: {what} {json.dumps(value)} is not supported by the torch core;"
            f" supported: {supported}"
        )

    if not isinstance(config, dict) or config.get("quant_method") != "compressed-tensors":
        raise refuse(
            "quant_method",
            config.get("quant_method") if isinstance(config, dict) else config,
            "compressed-tensors",
        )
    groups, kv_algorithm = config.get("config_groups"), "none"
    if (scheme := config.get("kv_cache_scheme")) is not None:
        if not isinstance(scheme, dict):
            raise refuse("kv_cache_scheme", scheme, "null, or an object")
        _check("kv_cache_scheme.", scheme, "float", ("tensor", "attn_head"), refuse)
        kv_algorithm = "fp8"
    if groups == {} and kv_algorithm != "none":
        return Quantized("none", kv_algorithm)
    if (
        not isinstance(groups, dict)
        or len(groups) != 1
        or not all(isinstance(group, dict) for group in groups.values())
    ):
        raise refuse("config_groups", groups, "one group")
    group = next(iter(groups.values()))
    weights = group.get("weights") or {}
    for name, value, allowed in (
        ("format", config.get("format"), tuple(_FORMATS.values())),
        ("targets", group.get("targets"), (["Linear"],)),
        ("weights.type", weights.get("type"), tuple(_TYPES)),
    ):
        if value not in allowed:
            raise refuse(name, value, ", ".join(map(json.dumps, allowed)))
    _check("weights.", weights, weights["type"], ("channel",), refuse)
    if "lm_head" not in (config.get("ignore") or ()):
        raise refuse("ignore", config.get("ignore"), 'a list with "lm_head" in it')
    return Quantized(_TYPES[weights["type"]], kv_algorithm)


def _check(
    prefix: str,
    numbers: dict[str, Any],
    kind: str,
    strategies: tuple[str, ...],
    refuse: Callable[..., ConfigError],
) -> None:
    """Refuse 8-bit numbers of `kind` that are not rounded as ours are."""
    for name, default, allowed in (
        ("num_bits", None, (8,)),
        ("type", None, (kind,)),
        ("strategy", None, strategies),
        ("symmetric", True, (True,)),
        ("dynamic", False, (False,)),
    ):
        if (value := numbers.get(name, default)) not in allowed:
            raise refuse(prefix + name, value, ", ".join(map(json.dumps, allowed)))
