"""A rank's weights in its engine's format: cut from whole parameters, or read from a built engine."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from disagg.errors import ConfigError
from mpillm.engine.kernels.linear import Linear, make_linear
from mpillm.engine.shape import int4, mxfp4
from mpillm.engine.shape.composition import CORRECTION, FUSED
from mpillm.engine.shape.dtypes import torch_dtype
from mpillm.engine.shape.engine_folder import EngineFolder, layouts
from mpillm.engine.shape.entries import (
    blocks_name,
    int4_group,
    is_experts,
    kv_scale_names,
    rank_kv_scales,
    scale_name,
)
from mpillm.engine.shape.layout import RankLayout
from mpillm.engine.shape.model_config import ModelConfig
from mpillm.engine.shape.model_info import ModelInfo
from mpillm.engine.tensors.rounding import dequantize_rows, quantize_rows
from mpillm.engine.weights import bytes_held
from mpillm.engine.weights.sources import Checkpoint, DummyWeights, WeightSource
from mpillm.telemetry.read_log import ReadLog


class Weights(ABC):
    """A rank's parts of the parameters in its engine's format, by name without `.weight`."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device

    def get(self, name: str) -> Tensor:
        """Return a parameter other than a linear projection, always as floats."""
        weight = self._parameter(f"{name}.weight")
        bytes_held.note(weight.nbytes)
        return weight

    @abstractmethod
    def _parameter(self, name: str) -> Tensor:
        """Return a parameter by its full name."""

    @abstractmethod
    def bias(self, name: str) -> Tensor:
        """Return the bias of a linear projection (see `matrix`): floats [out]."""

    @abstractmethod
    def matrix(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Return a linear projection, maybe fused (see `FUSED`): [out, in].

        With 8 bits also scales: float32 [out, 1]. With four bits, the formats of `mxfp4` or `int4`.
        """

    @abstractmethod
    def kv_scales(self, layers: range) -> Tensor | None:
        """Return the scales of an fp8 KV cache: float32 [layers, 2, kv_heads of this rank]; None: all 1."""

    def dense(self, name: str) -> Tensor:
        """Return a linear projection as floats."""
        weight, scales = self.matrix(name)
        weight = weight if scales is None else dequantize_rows(weight, scales, self.dtype)
        bytes_held.note(weight.nbytes)
        return weight

    def linear(self, name: str) -> Linear:
        weight, scales = self.matrix(name)
        bytes_held.note(weight.nbytes + (0 if scales is None else scales.nbytes))
        return make_linear(weight, scales, self.dtype)


class Shards(Weights):
    """Parts cut from whole parameters, fused as the engine needs them."""

    def __init__(
        self,
        source: WeightSource,
        config: ModelConfig,
        layout: RankLayout,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        quantization: str = "none",
    ) -> None:
        """`quantization`: of the checkpoint, or the type to which a checkpoint of floats is rounded."""
        super().__init__(config, dtype, device)
        self._source = source
        self._layout = layout
        self._quantization = quantization
        self._group = int4_group(config)

    def bias(self, name: str) -> Tensor:
        prefix, _, last = name.rpartition(".")
        names = [f"{prefix}.{part}.bias" for part in FUSED.get(last, (last,))]
        bias = torch.cat([self._parameter(name) for name in names])
        return bias if self._layout.adds_bias(names[0]) else torch.zeros_like(bias)

    def _parameter(self, name: str) -> Tensor:
        """Return this rank's part of a parameter without quantization; rows of q and k in `model`'s order."""
        part = self._source.get(name, *self._layout.part(name, self.config)).to(self.device)
        if name.endswith("norm.weight") and self.config.family.norms_less_one:
            part = part.float() + 1
        if name.endswith("q_norm.weight") and (scalar := self.config.query_scalar) is not None:
            part = part.float() * math.sqrt(self.config.head_dim / scalar)
        if CORRECTION in name:
            return part.float()
        part = part.to(self.dtype)
        if name.endswith(("q_proj.bias", "k_proj.bias", "q_norm.weight", "k_norm.weight")):
            return rotary_order(part[:, None], self.config.head_dim)[:, 0].contiguous()
        return part

    def matrix(self, name: str) -> tuple[Tensor, Tensor | None]:
        prefix, _, last = name.rpartition(".")
        parts = [self._part(f"{prefix}.{part}.weight") for part in FUSED.get(last, (last,))]
        weight = parts[0][0] if len(parts) == 1 else torch.cat([weight for weight, _ in parts])
        scales = [scales for _, scales in parts if scales is not None]
        return weight, torch.cat(scales) if scales else None

    def kv_scales(self, layers: range) -> Tensor | None:
        if self.config.kv_quantization == "none":
            return None
        heads, n = self._layout.kv_heads(self.config), self.config.n_kv_heads
        of_all = [
            [self._source.get(name).float().flatten().expand(n) for name in kv_scale_names(layer)]
            for layer in layers
        ]
        return torch.stack([torch.stack(pair) for pair in of_all])[:, :, heads].contiguous().to(self.device)

    def _part(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Return the part of one parameter; rows of q and k in `model`'s order."""
        rows, columns = self._layout.part(name, self.config)
        scales: Tensor | None = None
        if self._quantization == "int4" or (self._quantization == "mxfp4" and is_experts(name)):
            if self.config.quantization == "int4" or self.config.stored == "mxfp4":
                names = blocks_name(name), scale_name(name)
                weight, scales = (self._source.get(each, rows, columns).to(self.device) for each in names)
                return self._in_order(name, weight), self._in_order(name, scales)
            floats = self._in_order(name, self._source.get(name, rows, columns).to(self.device))
            is_mxfp4 = self._quantization == "mxfp4"
            return mxfp4.rounded(floats) if is_mxfp4 else int4.rounded(floats, self._group)
        if self._quantization in ("none", "mxfp4"):
            weight = self._source.get(name, rows, columns).to(self.device, self.dtype)
        elif self.config.quantization == "none":
            # Whole rows, so that ranks that share a row's columns have the same scale.
            weight, scales = quantize_rows(self._source.get(name, rows).to(self.device), self._quantization)
            weight = weight[:, columns].contiguous()
        else:
            weight = self._source.get(name, rows, columns).to(self.device)
            scales = self._source.get(scale_name(name), rows).to(self.device, torch.float32)
        return self._in_order(name, weight), None if scales is None else self._in_order(name, scales)

    def _in_order(self, name: str, rows: Tensor) -> Tensor:
        is_turned = name.endswith(("q_proj.weight", "k_proj.weight")) and self.config.latent is None
        return rotary_order(rows, self.config.head_dim) if is_turned else rows


def rotary_order(x: Tensor, head_dim: int) -> Tensor:
    """Return rows of a q or k projection [heads * head_dim, ...] in `model`'s order."""
    return x.reshape(-1, 2, head_dim // 2, *x.shape[1:]).transpose(1, 2).reshape(x.shape)


class EngineWeights(Weights):
    """A rank's file of an engine, memory-mapped: bytes are read when a device or a computation needs them."""

    def __init__(
        self, engine: EngineFolder, config: Any, layout: RankLayout, device: torch.device | str
    ) -> None:
        """Raise ConfigError if the file cannot be opened; `check_engine` has checked its content."""
        super().__init__(config, torch_dtype(engine.dtype), device)
        self._path = engine.file(layout)
        ReadLog().note(self._path)
        try:
            self._file = safe_open(self._path, framework="pt", device=str(device))
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{self._path}: cannot be read: {error}") from error

    def bias(self, name: str) -> Tensor:
        return self._parameter(f"{name}.bias")

    def matrix(self, name: str) -> tuple[Tensor, Tensor | None]:
        weight = self._parameter(f"{name}.weight")
        return weight, None if weight.dtype == self.dtype else self._parameter(scale_name(f"{name}.weight"))

    def kv_scales(self, layers: range) -> Tensor | None:
        if self.config.kv_quantization == "none":
            return None
        return torch.stack([self._parameter(rank_kv_scales(layer)) for layer in layers])

    def _parameter(self, name: str) -> Tensor:
        try:
            tensor: Tensor = self._file.get_tensor(name)  # type: ignore[no-untyped-call]
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{self._path}: tensor {name} cannot be read: {error}") from error
        return tensor


def read_embedding(info: ModelInfo, device: str, *, dummy: bool) -> Tensor:
    """Return a one-stage model's whole embedding [vocabulary, hidden]. Raises as `open_weights` does."""
    each = layouts(info.layout) if info.engine is not None else [RankLayout()]
    parts = [open_weights(info, layout, device, dummy=dummy).get("model.embed_tokens") for layout in each]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def open_weights(info: ModelInfo, layout: RankLayout, device: str, *, dummy: bool) -> Weights:
    """Return a rank's weights: of a built engine, of a checkpoint, or random (`dummy`, or a preset's).

    Raises ConfigError if a file cannot be opened.
    """
    if info.engine is not None:
        return EngineWeights(info.engine, info.config, layout, device)
    source: WeightSource
    config = info.config
    if dummy or info.folder is None:  # these are floats, whatever a checkpoint has
        config = dataclasses.replace(config, quantization="none", stored="rows")
        source = DummyWeights(config, device)
    else:
        source = Checkpoint(info.folder, config)
    return Shards(source, config, layout, torch_dtype(info.dtype), device, info.quantization)
