"""The tensors in a file of weights: names, types and shapes. Without torch.

A quantized model keeps each linear projection of a layer as two tensors: 8-bit numbers, and a scale for each
row (see `quantization`). With MXFP4, the experts' projections are bytes and exponents (see `mxfp4`). With
int4, all projections are bytes, scales and zero points (see `int4`). An engine's file holds a rank's parts,
with projections of the same input fused into one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from mpillm.engine.shape.composition import CORRECTION, FUSED
from mpillm.engine.shape.dtypes import N_BYTES, STORED
from mpillm.engine.shape.layout import RankLayout
from mpillm.engine.shape.model_config import ModelConfig
from mpillm.engine.shape.quantization import BLOCK_SIZE

# By safetensors' names. The types in the second line occur only in files that are copied.
ITEM_BYTES = {STORED[name]: n for name, n in N_BYTES.items()}
ITEM_BYTES |= {"F64": 8, "I64": 8, "I32": 4, "I16": 2, "U8": 1, "BOOL": 1}
_LINEARS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
_LINEARS |= {"c_fc", "c_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"}
_LINEARS |= FUSED.keys()


BLOCK, NO_NUMBER = 32, 255  # MXFP4: numbers that share an exponent, and the exponent of NaN
TRANSFORMER = "transformer."  # may stand before a checkpoint's names


class Entry(NamedTuple):
    """A tensor in a file."""

    dtype: str  # safetensors' name
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


def is_linear(name: str) -> bool:
    """Return whether parameter `name` is a layer's linear projection, to which quantization applies."""
    layer, _, kind = name.rpartition(".")
    return kind == "weight" and layer.rpartition(".")[2] in _LINEARS


def is_experts(name: str) -> bool:
    """Return whether parameter `name` is a linear projection of an expert, to which MXFP4 applies."""
    return ".experts." in name and is_linear(name)


def blocks_name(name: str) -> str:
    """Return the name of a parameter's numbers in their stored format, in MXFP4 or int4."""
    return f"{name}_blocks"


def scale_name(name: str) -> str:
    """Return the name of the scales of a parameter ``….weight``."""
    return f"{name}_scale"


def block_scale_name(name: str) -> str:
    """Return the name of the scales of a parameter's blocks. Despite the name, they multiply the numbers."""
    return f"{name}_scale_inv"


def checkpoint_name(name: str) -> str:
    """Return a parameter's name in a checkpoint, where some names lack `.weight`."""
    is_bare = name.endswith((".sinks.weight", f".{CORRECTION}.weight"))
    return name.removesuffix(".weight") if is_bare else name


def kv_scale_names(layer: int) -> tuple[str, str]:
    """Return the names of a layer's scales of cached keys and values in a checkpoint."""
    return f"model.layers.{layer}.self_attn.k_scale", f"model.layers.{layer}.self_attn.v_scale"


def kv_scale_alias(name: str) -> str:
    """Return ModelOpt's name for one of `kv_scale_names`; any other name unchanged."""
    layer, _, kind = name.rpartition(".")
    return f"{layer}.{kind[0]}_proj.{kind}" if kind in ("k_scale", "v_scale") else name


def rank_kv_scales(layer: int) -> str:
    """Return the name of both in an engine's file: float32 [2, KV heads of the rank], the keys' first."""
    return f"model.layers.{layer}.self_attn.kv_scale"


def int4_group(model: ModelConfig) -> int:
    """Return how many inputs of an output share a scale in the engine.

    If all inputs share one in the checkpoint, the engine repeats it for each 128.
    """
    return 128 if model.group == -1 else model.group


def stored(
    name: str, shape: tuple[int, ...], dtype: str, quantization: str, group: int = 0
) -> dict[str, Entry]:
    """Return the tensors of a parameter of `shape` in a model of `dtype` and `quantization`: one, or two.

    `group`: see `int4_group`.
    """
    if CORRECTION in name:
        dtype = "float32"
    if quantization == "mxfp4" and is_experts(name):
        n_out, n_in = shape
        return {name: Entry("U8", (n_out, n_in // 2)), scale_name(name): Entry("U8", (n_out, n_in // BLOCK))}
    if quantization == "int4" and is_linear(name):
        n_out, n_in = shape
        scales = Entry(STORED["float16"], (n_out, n_in // group, 2))
        return {name: Entry("U8", (n_out, n_in // 2)), scale_name(name): scales}
    if quantization in ("none", "mxfp4") or not is_linear(name):
        return {name: Entry(STORED[dtype], shape)}
    return {name: Entry(STORED[quantization], shape), scale_name(name): Entry("F32", (shape[0], 1))}


def in_checkpoint(name: str, shape: tuple[int, ...], model: ModelConfig) -> dict[str, Entry]:
    """Return the tensors of a parameter in a checkpoint of `model`, as `stored` does."""
    if is_linear(name) and model.stored == "matrix":
        return {name: Entry(STORED[model.quantization], shape), scale_name(name): Entry("F32", ())}
    if is_linear(name) and model.stored == "blocks":
        blocks = tuple(-(-n // BLOCK_SIZE) for n in shape)
        return {name: Entry(STORED["fp8"], shape), block_scale_name(name): Entry("F32", blocks)}
    return stored(checkpoint_name(name), shape, model.dtype, model.quantization)


def rank_entries(
    model: ModelConfig, layout: RankLayout, dtype: str, quantization: str, kv_quantization: str = "none"
) -> dict[str, Entry]:
    """Return the tensors of a rank in memory and in an engine's file: its parts of the parameters, fused."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in layout.shapes(model).items():
        path, _, kind = name.rpartition(".")
        layer, dot, last = path.rpartition(".")
        fused = next((fused for fused, parts in FUSED.items() if last in parts), last)
        fused_name = f"{layer}{dot}{fused}.{kind}"
        shapes[fused_name] = (shapes[fused_name][0] + shape[0], *shape[1:]) if fused_name in shapes else shape
    entries: dict[str, Entry] = {}
    for fused_name, shape in shapes.items():
        entries |= stored(fused_name, shape, dtype, quantization, int4_group(model))
    if kv_quantization != "none":
        n_heads = len(range(model.n_kv_heads)[layout.kv_heads(model)])
        entries |= {rank_kv_scales(layer): Entry("F32", (2, n_heads)) for layer in layout.layers(model)}
    return entries


def rank_bytes(model: ModelConfig, layout: RankLayout, dtype: str, quantization: str) -> int:
    """Return the bytes of a rank's weights, as its engine holds them."""
    return sum(entry.n_bytes for entry in rank_entries(model, layout, dtype, quantization).values())


def layer_bytes(model: ModelConfig, dtype: str, quantization: str) -> tuple[int, int]:
    """Return the bytes of all layers' weights in an engine of one rank, and the experts' bytes among them."""
    entries = rank_entries(model, RankLayout(), dtype, quantization)
    sizes = {name: entry.n_bytes for name, entry in entries.items() if ".layers." in name}
    return sum(sizes.values()), sum(n for name, n in sizes.items() if ".experts." in name)
