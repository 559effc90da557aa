"""Operations between matrix products on CPUs, one call each: `cpu_kernels.c`, compiled at load.

PyTorch makes several passes for each operation, and a dozen passes for a cache in blocks. `ops` and
`attention` compute the same in PyTorch, for hosts without a C compiler and for dtypes and heads that the
kernels do not support.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from mpillm.engine.kernels import ops
from mpillm.engine.kernels.c_library import INT, POINTER, address, c_function, c_library
from mpillm.engine.kernels.ops import Partial, UnscaledProduct
from mpillm.engine.shape.composition import Activation

_SOURCE = Path(__file__).with_suffix(".c")


class CpuKernels:
    """Implements `step_parts.Ops` for float32 or bfloat16, and attention over a cache of the same dtype."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._add_norm = c_function(library, "add_norm", *[POINTER] * 4, *[INT] * 2, ctypes.c_float)
        self._silu_mul = c_function(library, "silu_mul", *[POINTER] * 2, *[INT] * 2)
        self._rotate_store = c_function(library, "rotate_store", *[POINTER] * 5, *[INT] * 4)
        self._attend = c_function(library, "attend", *[POINTER] * 7, *[INT] * 4)
        self.library = library  # `CpuLayers` calls its other functions

    def add_norm(
        self,
        x: Tensor,
        delta: Tensor | UnscaledProduct | Partial | None,
        weight: Tensor,
        eps: float,
        rounds: bool = False,
    ) -> Tensor:
        """Compute `ops.add_norm`."""
        assert not rounds and not isinstance(delta, UnscaledProduct | Partial)
        out = torch.empty_like(x)
        added = None if delta is None else address(delta)
        self._add_norm(address(x), added, address(weight), address(out), *x.shape, eps)
        return out

    def gated(
        self, gate_up: Tensor | UnscaledProduct, rounds: bool = False, activation: Activation = "silu"
    ) -> Tensor:
        """Compute `ops.gated`."""
        if activation != "silu":
            return ops.gated(gate_up, rounds, activation)
        assert not rounds
        gate_up = ops.scaled(gate_up)
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        self._silu_mul(address(gate_up), address(out), *out.shape)
        return out

    # A kernel would save nothing on a CPU.
    scaled = staticmethod(ops.scaled)
    route = staticmethod(ops.route)
    route_grouped = staticmethod(ops.route_grouped)
    combine = staticmethod(ops.combine)

    def rotate_store(
        self, qkv: Tensor, rotations: Tensor, slots: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        """Rotate queries and keys in place, and store keys and values.

        Args:
            qkv: [rows, heads + 2 * kv_heads, head_dim].
            rotations: complex64 [rows, head_dim / 2].
            slots: int64 [rows], block * tokens_per_block + place in the block.
            keys: A layer's keys in the cache; `values` likewise.
        """
        kv_heads, size = keys.shape[1:3]
        n, heads = qkv.shape[:2]
        arrays = map(address, (qkv, rotations, slots, keys, values))
        self._rotate_store(*arrays, n, heads - 2 * kv_heads, kv_heads, size)

    def attend(
        self,
        qkv: Tensor,
        out: Tensor,
        keys: Tensor,
        values: Tensor,
        rows: Tensor,
        tables: Tensor,
        longest: int,
        sinks: Tensor | None = None,
    ) -> None:
        """Attend with some rows of qkv to the cache; write the result to `out`.

        rows: int64 [n, 4]: a row's index, the start of its sequence's blocks in `tables` (int64), and the
        first token and the end of the tokens that the row sees (at most `longest`). sinks: see `LayerKind`.
        """
        arrays = map(address, (qkv, out, keys, values, rows, tables))
        added = None if sinks is None else address(sinks)
        self._attend(*arrays, added, len(rows), *keys.shape[1:3], longest)


@functools.cache
def cpu_kernels(dtype: torch.dtype, head_dim: int, group: int) -> CpuKernels | None:
    """Compile or load the kernels for rows of `dtype` and `group` query heads for each KV head.

    None if that is not possible.
    """
    if dtype not in (torch.float32, torch.bfloat16) or head_dim % 16:
        return None
    macros = {"BF16": int(dtype == torch.bfloat16), "D": head_dim, "GROUP": group}
    library = c_library(_SOURCE, *(f"{name}={value}" for name, value in macros.items()))
    return None if library is None else CpuKernels(library)
