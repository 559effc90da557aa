"""Formats of quantized weights, and their description in `config.json`. No torch; `quantize` computes.

The matrices of a layer's linear projections have 8 bits, with one scale per output channel (a row of the
matrix): a weight is the number times its row's scale. Embedding, norms, router and `lm_head` keep their type.
On disk that is the format of compressed-tensors (https://github.com/vllm-project/compressed-tensors:
`int-quantized` and `float-quantized`, strategy `channel`), which transformers, vLLM and llm-compressor read
and write: `X.weight` [out, in] as int8 or float8_e4m3fn, `X.weight_scale` [out, 1].

A KV cache may also be fp8. A checkpoint with `kv_cache_scheme` has one scale for the keys and one for the
values of each layer, or of each KV head. A number in the cache times its scale is the key or value.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from disagg.errors import ConfigError, nearest
from mpillm.engine.shape.config_fields import Raw
from mpillm.files import excerpt, read_object

ALGORITHMS = ("int8", "fp8")
# Types of weights in the engine's memory. With MXFP4 only experts have it, other weights are floats.
TYPES = (*ALGORITHMS, "mxfp4", "int4")
RECORD = "quantization.json"  # in a folder that `quantize` made: what was done, each matrix's relative error
_TYPES = {"int": "int8", "float": "fp8"}
_Refuse = Callable[[str, Any, str], ConfigError]  # takes a field, its value, and what is supported
_DENSE = "dense"  # compressed-tensors' word for weights that are floats
_FORMATS = {"int8": "int-quantized", "fp8": "float-quantized"}
_PACKED = "pack-quantized"  # also of compressed-tensors: int4


MODELOPT = "hf_quant_config.json"
BLOCK_SIZE = 128  # rows and columns of "blocks"
# The numbers that share a scale in a checkpoint: a row of a matrix, the whole matrix, a square block, or 32
# numbers of MXFP4. The engine has a scale for each row, floats for blocks, and either floats or MXFP4 for
# MXFP4. "awq" and the formats behind it are int4 (see `int4`).
Stored = Literal["rows", "matrix", "blocks", "mxfp4", "awq", "gptq", "gptq2", "packed", "packed symmetric"]
GROUPS = (32, 64, 128, -1)  # inputs with one scale in int4; -1: all
_STRATEGIES: dict[str, Stored] = {"channel": "rows", "tensor": "matrix"}  # compressed-tensors' words


def weight_type(quantization: str, on_gpu: bool) -> str:
    """Return the weights' type in the engine's memory: on a CPU fp8 weights are floats (see `linear`)."""
    return "none" if quantization == "fp8" and not on_gpu else quantization


def check_algorithm(source: str, algorithm: str, allowed: tuple[str, ...]) -> None:
    """Raise ConfigError naming `source` (an option, as a rule) unless `algorithm` is one of `allowed`."""
    if algorithm not in allowed:
        raise ConfigError(
            f"{source} {algorithm}: not one of {', '.join(allowed)}{nearest(algorithm, allowed)}"
        )


def quantization_config(
    algorithm: str, router: str | None = None, kv_algorithm: str = "none"
) -> dict[str, Any]:
    """Return `config.json`'s entry for `algorithm` and the cache's `kv_algorithm`: none (the model's) or fp8.

    `router`: name, within a layer, of the router of a mixture of experts, which keeps its type.

    fp8 multiplies 8-bit weights with activations that are quantized token by token at run time
    (llm-compressor's FP8_DYNAMIC); int8 quantizes only weights.
    """
    scheme: dict[str, Any] | None = None
    if kv_algorithm == "fp8":
        scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
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
        "format": _FORMATS[algorithm],  # without it, readers would expect int8 weights packed into int32
    }
    return {
        **common,
        "format": _FORMATS[algorithm],
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", *([f"re:.*{router.replace('.', '[.]')}$"] if router else [])],
    }


class Quantization(NamedTuple):
    """The quantization of a checkpoint."""

    weights: str = "none"  # or int8 or fp8: what the engine computes with
    kv_cache: str = "none"  # or fp8
    stored: Stored = "rows"
    group: int = 0  # one of `GROUPS`, in int4


def parse_quantization(raw: Raw, source: Path, more: Sequence[str]) -> Quantization:
    """Read `quantization_config`, or ModelOpt's file beside `source`.

    Raises ConfigError if it is not supported. `more`: methods that only the model's family supports.
    """
    config = raw.get("quantization_config")
    modelopt = source.parent / MODELOPT
    if config is None and modelopt.is_file():
        config = {"quant_method": "modelopt"} | read_object(modelopt).get("quantization", {})
        source = modelopt
    if config is None:
        return Quantization()

    def refuse(name: str, value: Any, supported: str) -> ConfigError:
        return ConfigError(
            f"{source}: quantization_config: {name} {excerpt(value)} is not supported by the torch core;"
            f" supported: {supported}; fetch the model in a supported form, or unquantized weights, which"
            " --quantization rounds"
        )

    method = config.get("quant_method") if isinstance(config, dict) else config
    methods = _METHODS | {name: _FAMILY_METHODS[name] for name in more}
    if not isinstance(method, str) or method not in methods:
        raise refuse("quant_method", method, ", ".join(methods))
    quantized = methods[method](config, refuse)
    if _has_kv_scales(config, refuse):
        quantized = quantized._replace(kv_cache="fp8")
    if quantized.weights == "int4" and not more:  # the family's checkpoints have other tensors, or experts
        raise refuse("format", config.get("format"), ", ".join(map(json.dumps, _FORMATS.values())))
    return quantized


def _compressed(config: Raw, refuse: _Refuse) -> Quantization:
    groups = config.get("config_groups")
    if groups == {} and config.get("kv_cache_scheme") is not None:
        return Quantization()
    named = groups if isinstance(groups, dict) else {}
    if len(named) != 1 or not all(isinstance(group, dict) for group in named.values()):
        raise refuse("config_groups", groups, "one group")
    group = next(iter(named.values()))
    weights = group.get("weights") or {}
    _check(config, refuse, format=(*_FORMATS.values(), _PACKED))
    _check(group, refuse, targets=(["Linear"],))
    if "lm_head" not in (config.get("ignore") or ()):
        raise refuse("ignore", config.get("ignore"), 'a list with "lm_head" in it')
    if config["format"] == _PACKED:
        return _packed(group, weights, refuse)
    _check(weights, refuse, "weights.", type=tuple(_TYPES))
    _check_numbers(weights, weights["type"], tuple(_STRATEGIES), refuse, "weights.")
    return Quantization(_TYPES[weights["type"]], stored=_STRATEGIES[weights["strategy"]])


def _packed(group: Raw, weights: Raw, refuse: _Refuse) -> Quantization:
    """Read `pack-quantized`, with inputs in their original order and no rounding of activations."""
    _check(group, refuse, format=(None, _PACKED), input_activations=(None,))
    values = {"symmetric": True, "dynamic": False, "strategy": "group", **weights}
    _check(
        values, refuse, "weights.", num_bits=(4,), type=("int",), symmetric=(True, False), dynamic=(False,)
    )
    _check(values, refuse, "weights.", strategy=("group", "channel"), actorder=(None, "weight", "static"))
    is_grouped = values["strategy"] == "group"
    _check(values, refuse, "weights.", group_size=GROUPS[:-1] if is_grouped else (None, -1))
    form: Stored = "packed symmetric" if values["symmetric"] else "packed"
    return Quantization("int4", stored=form, group=values["group_size"] if is_grouped else -1)


def _modelopt(config: Raw, refuse: _Refuse) -> Quantization:
    """Read `hf_quant_config.json` of NVIDIA's ModelOpt, or what newer versions write into `config.json`."""
    if (algorithm := config.get("quant_algo")) != "FP8":
        raise refuse("quant_algo", algorithm, '"FP8"')
    unquantized = config.get("exclude_modules") or config.get("ignore")
    if "lm_head" not in (unquantized or ()):
        raise refuse("exclude_modules", unquantized, 'a list with "lm_head" in it')
    cache = config.get("kv_cache_quant_algo")
    if cache not in (None, "FP8"):
        raise refuse("kv_cache_quant_algo", cache, 'null, "FP8"')
    return Quantization("fp8", "fp8" if cache else "none", "matrix")


def _fp8(config: Raw, refuse: _Refuse) -> Quantization:
    """Read the format of DeepSeek and Qwen: a scale for each block. The engine widens weights to floats."""
    if (size := config.get("weight_block_size")) is None:
        return Quantization("fp8", stored="matrix")
    if size != [BLOCK_SIZE] * 2:
        raise refuse("weight_block_size", size, f"[{BLOCK_SIZE}, {BLOCK_SIZE}]")
    if (scales := config.get("scale_fmt", "float")) not in ("float", None):
        raise refuse("scale_fmt", scales, "floats")
    return Quantization(stored="blocks")


def _awq(config: Raw, refuse: _Refuse) -> Quantization:
    """Read the format of AutoAWQ: `gemm`, its only format for many rows."""
    values = {"version": "gemm", "zero_point": True, "modules_to_not_convert": None, **config}
    _check(values, refuse, bits=(4,), group_size=GROUPS, version=("gemm", "GEMM"), zero_point=(True,))
    _check(values, refuse, modules_to_not_convert=(None, [], ["lm_head"]))
    return Quantization("int4", stored="awq", group=values["group_size"])


def _gptq(config: Raw, refuse: _Refuse) -> Quantization:
    """Read the format of AutoGPTQ and GPTQModel, with inputs in their original order."""
    values = {"checkpoint_format": "gptq", **config}
    off = False, None
    _check(values, refuse, bits=(4,), group_size=GROUPS, desc_act=off, checkpoint_format=("gptq", "gptq_v2"))
    _check(values, refuse, is_marlin_format=off, lm_head=off)
    _check(values, refuse, dynamic=(None, {}), modules_in_block_to_quantize=(None,))
    form: Stored = "gptq2" if values["checkpoint_format"] == "gptq_v2" else "gptq"
    return Quantization("int4", stored=form, group=values["group_size"])


def _mxfp4(config: Raw, refuse: _Refuse) -> Quantization:
    return Quantization(stored="mxfp4")


def _has_kv_scales(config: Raw, refuse: _Refuse) -> bool:
    """Return whether the checkpoint has scales for a KV cache in fp8."""
    scheme = config.get("kv_cache_scheme")
    if scheme in (None, "static"):  # "static": of vLLM's `fp8`
        return scheme is not None
    if not isinstance(scheme, dict):
        raise refuse("kv_cache_scheme", scheme, 'null, "static", or an object')
    # ModelOpt leaves out the values of fp8's usual form.
    numbers, strategies = {"strategy": "tensor"} | scheme, ("tensor", "attn_head")
    _check_numbers(numbers, "float", strategies, refuse, "kv_cache_scheme.")
    return True


def _check_numbers(
    numbers: Raw, kind: str, strategies: tuple[str, ...], refuse: _Refuse, prefix: str
) -> None:
    """Refuse 8-bit numbers of `kind` that are not rounded as ours are."""
    values = {"symmetric": True, "dynamic": False, **numbers}
    _check(values, refuse, prefix, num_bits=(8,), type=(kind,), strategy=strategies)
    _check(values, refuse, prefix, symmetric=(True,), dynamic=(False,))


def _check(values: Raw, refuse: _Refuse, prefix: str = "", **allowed: tuple[Any, ...]) -> None:
    """Refuse the first value that is not allowed for its name; a missing value is None."""
    for name, some in allowed.items():
        if (value := values.get(name)) not in some:
            raise refuse(prefix + name, value, ", ".join(map(json.dumps, some)))


_METHODS: dict[str, Callable[..., Quantization]] = {
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "fp8": _fp8,
}
_FAMILY_METHODS: dict[str, Callable[..., Quantization]] = {"awq": _awq, "gptq": _gptq, "mxfp4": _mxfp4}
