"""Products of few rows on NVIDIA GPUs, fused with the operation that follows.

A product of few rows takes as long as reading its weights from memory, if enough programs read
simultaneously. So a program has a narrow tile of outputs. If there are too few tiles, several programs share
a tile, each with a part of the sum. The last program to finish adds the parts, always in the same order, so
that the result does not depend on which program is last.

SiLU and the sum with the residual are fused, since a separate small kernel takes 3 to 4 us, 2 to 4 % of a
layer's time. Fusing the norm before a product would save another 1 to 2 % of a step. But the norm needs the
result of the previous product (docs/explain/engine.md).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpillm.engine.kernels.early_starts import after_previous, let_next_start, starts_early
from mpillm.engine.kernels.int4_kernels import GROUP, factor, numbers
from mpillm.engine.kernels.launch import Kernel, cdiv, next_power_of_2


class _TileShape(NamedTuple):
    """Launch parameters of a product."""

    columns: int  # outputs of a program
    depth: int  # inputs that it reads at a time
    n_stages: int
    n_warps: int
    n_programs: int  # that the launch aims for


# Measured on an H200, for weights in fp8, int4 and floats: launch parameters by the largest number of rows.
# For more rows, cuBLAS is faster. Fused products with large bfloat16 weights are faster than cuBLAS up to 32
# rows.
_TILE_SHAPES = {
    torch.float8_e4m3fn: {8: _TileShape(32, 128, 4, 2, 512)},
    torch.int16: {
        16: _TileShape(32, 128, 4, 2, 512),
        64: _TileShape(64, 128, 4, 4, 256),
        128: _TileShape(128, 128, 3, 8, 128),
    },
}
_FLOAT_TILE_SHAPES = {16: _TileShape(32, 128, 3, 2, 512)}
_LARGE, _LARGE_TILE_SHAPES = 48 << 20, {**_FLOAT_TILE_SHAPES, 32: _TileShape(64, 128, 4, 4, 128)}
MAX_ROWS = {dtype: max(tile_shapes) for dtype, tile_shapes in _TILE_SHAPES.items()}
_MAX_SPLITS = 8


@triton.jit
def _widened(numbers):
    """Return float8_e4m3fn as bfloat16, four at a time: the bits moved into place, times 2^120.

    The factor corrects the exponent. Triton's own conversion goes through float16, one number at a time, and
    is slower than reading the numbers from memory.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, scale, none;
        prmt.b32 a, $2, 0, 0x1404;
        prmt.b32 b, $2, 0, 0x3424;
        shr.u32 c, a, 4;
        shr.u32 d, b, 4;
        and.b32 a, a, 0x80008000;
        and.b32 b, b, 0x80008000;
        lop3.b32 a, c, 0x07F007F0, a, 0xEA;
        lop3.b32 b, d, 0x07F007F0, b, 0xEA;
        mov.b32 scale, 0x7B807B80;
        mov.b32 none, 0x80008000;
        fma.rn.bf16x2 $0, a, scale, none;
        fma.rn.bf16x2 $1, b, scale, none;
        }""",
        "=r,=r,r", [numbers], dtype=tl.bfloat16, is_pure=True, pack=4,
    )  # fmt: skip


@Kernel
@triton.jit(do_not_specialize=["n"])
def _product(
    out, parts, arrived, x, weight, scales, n, n_out, n_in,
    ACTIVATED: tl.constexpr, ADDED: tl.constexpr, SCALED: tl.constexpr, INT4: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute a tile of `out` [n, n_out].

    With ACTIVATED, the weights have twice as many outputs as `out`, and a tile has a gate and an up value for
    each output of `out`.
    """
    after_previous(EARLY)
    if not ACTIVATED:  # otherwise another product follows
        let_next_start(EARLY)
    tile, split = tl.program_id(0), tl.program_id(1)
    row, depth, place = tl.arange(0, ROWS), tl.arange(0, DEPTH), tl.arange(0, COLUMNS)
    WIDTH: tl.constexpr = COLUMNS // 2 if ACTIVATED else COLUMNS  # of the tile in `out`
    real_place = tile * WIDTH + place % WIDTH < n_out
    column = (place // WIDTH) * n_out + tile * WIDTH + place % WIDTH
    share = tl.cdiv(tl.cdiv(n_in, DEPTH), SPLITS) * DEPTH
    first = split * share
    a = weight + column.to(tl.int64)[:, None] * n_in + depth[None, :]
    b = x + row[None, :] * n_in + depth[:, None]
    total = tl.zeros([COLUMNS, ROWS], tl.float32)  # transposed: a tensor core's left operand is longer
    if INT4:
        n_all = 2 * n_out if ACTIVATED else n_out
        word = tl.arange(0, 32)
        packed_at = weight + (first // 128 * n_all + column).to(tl.int64)[:, None] * 32 + word[None, :]
        scales_at = scales + first // 128 * n_all + column
        for at in range(first, tl.minimum(first + share, n_in), 128):
            packed = tl.load(packed_at, mask=real_place[:, None], other=0)
            both = tl.load(scales_at, mask=real_place, other=0)
            right = tl.load(b + at, mask=(row < n)[None, :], other=0.0)
            total += tl.dot(numbers(packed, both, COLUMNS), right) * factor(both)[:, None]
            packed_at += n_all * 32
            scales_at += n_all
    else:
        for at in range(first, tl.minimum(first + share, n_in), DEPTH):
            left = tl.load(a + at, mask=real_place[:, None] & (at + depth < n_in)[None, :], other=0.0)
            right = tl.load(b + at, mask=(row < n)[None, :] & (at + depth < n_in)[:, None], other=0.0)
            if SCALED:
                left = _widened(left)
            total = tl.dot(left, right.to(left.dtype), total)
    if SPLITS > 1:
        width = 2 * n_out if ACTIVATED else n_out
        real, cell = real_place[:, None] & (row < n)[None, :], row[None, :] * width + column[:, None]
        tl.store(parts + split * n * width + cell, total, mask=real)
        tl.debug_barrier()  # every thread has stored its part before one thread counts
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") < SPLITS - 1:
            return
        tl.store(arrived + tile, 0)  # for the next product
        total = tl.zeros([COLUMNS, ROWS], tl.float32)
        for i in range(SPLITS):
            total += tl.load(parts + i * n * width + cell, mask=real, other=0.0)
    if SCALED:
        total *= tl.load(scales + column, mask=real_place, other=0.0)[:, None]
    # Fused operations use the product in the dtype in which it would be stored.
    result = total.to(out.dtype.element_ty)
    if ACTIVATED:
        gate_up = tl.reshape(result.to(tl.float32), [2, WIDTH, ROWS])
        gate, up = tl.split(tl.permute(gate_up, (1, 2, 0)))
        result = (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty)
    to = tile * WIDTH + tl.arange(0, WIDTH)
    cell, real = out + row[None, :] * n_out + to[:, None], (to < n_out)[:, None] & (row < n)[None, :]
    if ADDED:
        result = tl.load(cell, mask=real, other=0.0).to(tl.float32) + result.to(tl.float32)
    tl.store(cell, result.to(out.dtype.element_ty), mask=real)


class FewRows:
    """Product with some weights, of at most `max_rows` rows, or `max_fused_rows` if it is fused."""

    def __init__(self, weight: Tensor, scales: Tensor | None) -> None:
        """weight [out, in]: float8_e4m3fn with scales (float32, one per output), or floats without scales.

        In int4: weight and scales as `int4_kernels.pack` returns them.
        """
        self._weight, self._scales = weight, scales
        self._is_int4 = weight.dtype == torch.int16
        self._shape = (weight.shape[1], GROUP * len(weight)) if self._is_int4 else tuple(weight.shape)
        self._tile_shapes = _TILE_SHAPES.get(weight.dtype, _FLOAT_TILE_SHAPES)
        self.max_rows = max(self._tile_shapes)
        if scales is None and weight.numel() >= _LARGE:
            self._tile_shapes = _LARGE_TILE_SHAPES
        self.max_fused_rows = max(self._tile_shapes)
        # Programs of each tile that have stored their part: zero again after each product.
        n_tiles = cdiv(self._shape[0], min(tile_shape.columns for tile_shape in self._tile_shapes.values()))
        self._arrived = torch.zeros(n_tiles, dtype=torch.int32, device=weight.device)

    def __call__(self, x: Tensor, activated: bool = False, residual: Tensor | None = None) -> Tensor:
        """Return x @ weight.T [n, out] with the dtype of x [n, in], which float weights share.

        `activated`: return silu(gate) * up [n, out / 2]; the gate's outputs come first. `residual` [n, out]:
        add the product to this tensor, and return the tensor.
        """
        n, (n_all, n_in) = len(x), self._shape
        tile_shape = next(tile_shape for max_rows, tile_shape in self._tile_shapes.items() if n <= max_rows)
        tiles = cdiv(n_all, tile_shape.columns)
        splits = min(
            _MAX_SPLITS, next_power_of_2(cdiv(tile_shape.n_programs, tiles)), cdiv(n_in, tile_shape.depth)
        )
        out = x.new_empty(n, n_all // 2 if activated else n_all) if residual is None else residual
        parts = out if splits == 1 else x.new_empty(splits, n, n_all, dtype=torch.float32)
        scales = x if self._scales is None else self._scales
        _product[(tiles, splits)](
            out, parts, self._arrived, x, self._weight, scales, n, out.shape[1], n_in,
            ACTIVATED=activated, ADDED=residual is not None,
            SCALED=self._scales is not None and not self._is_int4, INT4=self._is_int4,
            ROWS=max(8, next_power_of_2(n)), COLUMNS=tile_shape.columns, DEPTH=tile_shape.depth,
            SPLITS=splits,
            EARLY=starts_early(x), num_warps=tile_shape.n_warps, num_stages=tile_shape.n_stages,
        )  # fmt: skip
        return out
