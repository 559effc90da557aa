"""Compute steps on a CPU, one at a time."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from mpillm.engine.kernels.c_library import INT, POINTER, address, c_function
from mpillm.engine.kernels.cpu_kernels import CpuKernels
from mpillm.engine.kernels.huge_pages import keep_freed_memory
from mpillm.engine.kernels.linear import Linear
from mpillm.engine.model.attention import ByRow, StepAttention
from mpillm.engine.model.feed_forward import GatedMlp
from mpillm.engine.model.model_part import ModelPart
from mpillm.engine.model.projections import GroupedProjections
from mpillm.engine.model.step_parts import LayerStored
from mpillm.engine.schedule.step import Step
from mpillm.engine.shape.families import llama
from mpillm.engine.shape.model_config import ModelConfig


class _CLinear(ctypes.Structure):
    _fields_ = (
        ("multiply", POINTER),
        ("weights", POINTER),
        ("scales", POINTER),
        ("inputs", INT),
        ("outputs", INT),
    )


class _CLayer(ctypes.Structure):
    _fields_ = (
        *((name, POINTER) for name in ("input_norm", "post_norm")),
        *((name, _CLinear) for name in ("qkv", "o", "gate_up", "down")),
        *((name, POINTER) for name in ("keys", "values")),
        ("feature", INT),
    )


class _CAttention(ctypes.Structure):
    _fields_ = (
        *((name, POINTER) for name in ("rotations", "slots", "rows", "tables")),
        *((name, INT) for name in ("n_rows", "longest")),
    )


class CpuLayers:
    """The layers of a dense model, or of one of its stages, in one call, without tensor parallelism."""

    def __init__(self, part: ModelPart, kernels: CpuKernels, layers: list[_CLayer]) -> None:
        self._part = part
        self._layers = (_CLayer * len(layers))(*layers)
        arguments = POINTER, INT, *[POINTER] * 5, *[INT] * 5, ctypes.c_float
        self._run = c_function(kernels.library, "run_layers", *arguments)
        first = layers[0]
        self._hidden, self._attended = first.qkv.inputs, first.o.inputs
        # Scratch numbers for each row.
        self._scratch_per_row = 2 * self._hidden + first.qkv.outputs + 3 * first.down.inputs

    @classmethod
    def of(cls, part: ModelPart, kernels: CpuKernels) -> CpuLayers | None:
        """Return None with tensor parallelism, if a layer is not Llama's, or if a product is not compiled."""
        if part.groups.layout.tp_size > 1 or not part.model.in_parts:
            return None
        config = part.info.config
        if any(not _is_llama(config, index) for index in part.groups.layout.layers(config)):
            return None
        feature_layers = () if part.model.features is None else part.model.features.layers
        layers = []
        for i, layer in enumerate(part.model.layers):
            attention, feed_forward = layer.attention, layer.feed_forward
            assert isinstance(attention, GroupedProjections) and isinstance(feed_forward, GatedMlp)
            products = attention.product, attention.output.product
            linears = [_linear(each) for each in (*products, feed_forward.gate_up, feed_forward.down.product)]
            if None in linears:
                return None
            norms = address(layer.norm.weight), address(layer.post_norm.weight)
            cached = address(part.cache.keys[i]), address(part.cache.values[i])
            layers.append(
                _CLayer(*norms, *linears, *cached, feature_layers.index(i) if i in feature_layers else -1)
            )
        return cls(part, kernels, layers)

    def __call__(self, x: Tensor, attention: ByRow) -> Tensor:
        """Compute the arguments of `Decoder.leave`: x [rows, hidden] in place; return `attended`."""
        n, (kv_heads, size) = len(x), self._part.cache.keys.shape[2:4]
        attended, scratch = x.new_empty(n, self._attended), x.new_empty(n, self._scratch_per_row)
        step = _CAttention(
            *map(address, (attention.rotations, attention.slots, attention.rows, attention.tables)),
            len(attention.rows),
            attention.longest,
        )
        arrays: list[int | None] = [address(array) for array in (x, attended, scratch)]
        features = self._part.model.features
        assert features is None or len(features.rows) >= n
        arrays.append(None if features is None else address(features.rows))
        sizes = 0 if features is None else len(features.layers), n, self._hidden, kv_heads, size
        eps = self._part.info.config.rms_norm_eps
        self._run(self._layers, len(self._layers), ctypes.byref(step), *arrays, *sizes, eps)
        return attended


def _is_llama(config: ModelConfig, index: int) -> bool:
    """Return whether a layer has the formula of `run_layers`: Llama's, without a window."""
    return config.layer(index) == llama.layer(config, index) and not config.window(index)


def _linear(linear: Linear) -> _CLinear | None:
    if (product := linear.compiled()) is None:
        return None
    function, weights, scales = product
    return _CLinear(
        function,
        address(weights),
        None if scales is None else address(scales),
        linear.in_features,
        linear.out_features,
    )


class CpuSteps:
    """Implements `Steps`. A step needs the previous step's tokens, so nothing runs ahead."""

    n_ahead = 0

    def __init__(self, part: ModelPart, kernels: CpuKernels | None = None) -> None:
        keep_freed_memory()
        self._part = part
        # The kernels read and write a cache of the rows' own dtype.
        self._kernels = kernels if part.cache.keys.dtype == part.dtype else None
        self._layers = None if self._kernels is None else CpuLayers.of(part, self._kernels)
        self._tables: dict[int, list[int]] = {}  # slot -> its sequence's blocks

    def forward(
        self, step: Step, layer_stored: LayerStored = None, all_rows: bool = False, layerwise: bool = False
    ) -> Tensor:
        part = self._part
        for span in step.spans:
            if span.blocks:
                self._tables.setdefault(span.slot, [])[span.n_blocks_sent :] = span.blocks
        attention = StepAttention(
            step.spans,
            self._tables,
            part.cache,
            part.n_heads,
            part.model.rotations,
            part.dtype,
            self._kernels,
            part.model.kinds,
        )
        x = (
            part.model.embed(torch.tensor(step.tokens), attention.positions)
            if part.groups.layout.is_first_stage
            else part.receive_hidden(len(step.tokens))
        )
        logits_rows = None if all_rows else torch.tensor(step.logits_rows, dtype=torch.int64)
        by_row = None if layerwise or layer_stored else attention.by_row
        if self._layers is not None and by_row is not None:
            return part.model.leave(x, self._layers(x, by_row), logits_rows)
        return part.model.forward(x, attention, logits_rows, layer_stored)

    def feed(self, tokens: Tensor) -> None:
        """Do nothing: the host reads a step's tokens before it plans the step that computes with them."""

    def warm_up(self, max_num_tokens: int, run: Callable[[Step], object]) -> None:
        """Do nothing: no kernel is compiled."""
