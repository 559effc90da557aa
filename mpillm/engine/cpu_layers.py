"""`kernels/cpu_layers.h`: all layers of a step in one call.

Python's ten calls for each layer took 0.1 ms, together a fifth of a step with one row of a small model.
"""

from __future__ import annotations

import ctypes

from torch import Tensor

from mpillm.engine.kernels.c_library import address
from mpillm.engine.kernels.cpu_kernels import CpuKernels
from mpillm.engine.model.attention import ByRow
from mpillm.engine.model.feed_forward import Mlp
from mpillm.engine.model.linear import Linear
from mpillm.engine.model_part import ModelPart

_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p


class _Linear(ctypes.Structure):
    _fields_ = (
        ("multiply", _POINTER),
        ("weights", _POINTER),
        ("scales", _POINTER),
        ("inputs", _INT),
        ("outputs", _INT),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("input_norm", "post_norm")),
        *((name, _Linear) for name in ("qkv", "o", "gate_up", "down")),
        *((name, _POINTER) for name in ("keys", "values")),
        ("feature", _INT),
    )


class _Attention(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("rotations", "slots", "rows", "tables")),
        *((name, _INT) for name in ("n_rows", "longest")),
    )


class CpuLayers:
    """The layers of a dense model on an instance's only rank, or of a stage of it."""

    def __init__(self, part: ModelPart, kernels: CpuKernels, layers: list[_Layer]) -> None:
        self._part = part
        self._layers = (_Layer * len(layers))(*layers)
        self._run = kernels.library.run_layers
        self._run.argtypes = [_POINTER, _INT, *[_POINTER] * 5, *[_INT] * 5, ctypes.c_float]
        self._run.restype = None
        first = layers[0]
        self._hidden, self._attended = first.qkv.inputs, first.o.inputs
        self._room = 2 * self._hidden + first.qkv.outputs + 3 * first.down.inputs  # numbers for each row

    @classmethod
    def of(cls, part: ModelPart, kernels: CpuKernels) -> CpuLayers | None:
        """None if something is between its products, or some of them are not compiled."""
        if part.groups.layout.tp_size > 1 or not part.model.in_parts:
            return None
        kept = () if part.model.features is None else part.model.features.layers
        layers = []
        for i, layer in enumerate(part.model.layers):
            if not layer.is_plain:
                return None
            assert isinstance(layer.mlp, Mlp) and isinstance(layer.qkv, Linear)
            linears = [_linear(linear) for linear in (layer.qkv, layer.o, layer.mlp.gate_up, layer.mlp.down)]
            if None in linears:
                return None
            norms = address(layer.input_norm), address(layer.post_norm)
            cached = address(part.cache.keys[i]), address(part.cache.values[i])
            layers.append(_Layer(*norms, *linears, *cached, kept.index(i) if i in kept else -1))
        return cls(part, kernels, layers)

    def __call__(self, x: Tensor, attention: ByRow) -> Tensor:
        """Compute all that is before `Llama.leave`: its x [rows, hidden], in place, and its `attended`."""
        n, (kv_heads, size) = len(x), self._part.cache.keys.shape[2:4]
        attended, room = x.new_empty(n, self._attended), x.new_empty(n, self._room)
        step = _Attention(
            *map(address, (attention.rotations, attention.slots, attention.rows, attention.tables)),
            len(attention.rows),
            attention.longest,
        )
        arrays: list[int | None] = [address(array) for array in (x, attended, room)]
        features = self._part.model.features
        assert features is None or len(features.rows) >= n
        arrays.append(None if features is None else address(features.rows))
        sizes = 0 if features is None else len(features.layers), n, self._hidden, kv_heads, size
        eps = self._part.info.config.rms_norm_eps
        self._run(self._layers, len(self._layers), ctypes.byref(step), *arrays, *sizes, eps)
        return attended


def _linear(linear: Linear) -> _Linear | None:
    if (product := linear.compiled()) is None:
        return None
    function, weights, scales = product
    return _Linear(
        function,
        address(weights),
        None if scales is None else address(scales),
        linear.in_features,
        linear.out_features,
    )
