"""Weights in int4 on NVIDIA GPUs: four bits up to the registers that a tensor core reads (see `few_rows`).

A packed int16 has a number from each of four blocks of 32 inputs. A shift and a mask insert a number into the
low bits of 128 as bfloat16. Subtracting 128 and the zero point leaves the number minus its zero point,
exactly. The scale is applied to the sum of a group's products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpillm.engine.kernels.launch import Kernel, cdiv
from mpillm.engine.shape.mxfp4 import numbers_of

GROUP = 128  # inputs with one scale
_COLUMNS = 64


def pack(blocks: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return packed weights int16 [groups, out, 32], and scales with zero points, int32 [groups, out].

    Blocks [out, in / 2] and scales float16 [out, groups, 2]: see `int4`. An int32 has the scale as float16 in
    its lower half, and -(128 + zero point) as bfloat16 in its upper half.
    """
    each = numbers_of(blocks).to(torch.int32).view(len(blocks), -1, 4, GROUP // 4).unbind(2)
    packed = each[0] | each[1] << 4 | each[2] << 8 | each[3] << 12
    packed = torch.where(packed >= 1 << 15, packed - (1 << 16), packed).to(torch.int16)
    lower = scales[..., 0].contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
    upper = (-128 - scales[..., 1].float()).to(torch.bfloat16).view(torch.int16).to(torch.int32) << 16
    return packed.transpose(0, 1).contiguous(), (lower | upper).t().contiguous()


@triton.jit
def _four(packed, less):
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, one;
        mov.b32 one, 0x3F803F80;
        lop3.b32 a, $4, 0x000F000F, 0x43004300, 0xEA;
        fma.rn.bf16x2 $0, a, one, $5;
        shr.u32 b, $4, 4;
        lop3.b32 b, b, 0x000F000F, 0x43004300, 0xEA;
        fma.rn.bf16x2 $1, b, one, $5;
        shr.u32 a, $4, 8;
        lop3.b32 a, a, 0x000F000F, 0x43004300, 0xEA;
        fma.rn.bf16x2 $2, a, one, $5;
        shr.u32 b, $4, 12;
        lop3.b32 b, b, 0x000F000F, 0x43004300, 0xEA;
        fma.rn.bf16x2 $3, b, one, $5;
        }""",
        "=r,=r,=r,=r,r,r", [packed, less],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def numbers(packed, both, COLUMNS: tl.constexpr):
    """Return a group's numbers minus their zero points, bfloat16 [COLUMNS, 128]; packed [COLUMNS, 32]."""
    less = (both >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    w0, w1, w2, w3 = _four(packed, less[:, None])
    # The blocks in order; no number changes its register.
    four = tl.permute(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (0, 2, 3, 1))
    return tl.reshape(four, [COLUMNS, 128])


@triton.jit
def factor(both):
    """Return the scales in the int32 numbers of `pack`, float32."""
    return (both & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@Kernel
@triton.jit
def _widened(out, weights, scales, n_out, n_in, COLUMNS: tl.constexpr):
    group, word, depth = tl.program_id(1), tl.arange(0, 32), tl.arange(0, 128)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    real_column = column < n_out
    first = (group * n_out + column).to(tl.int64)
    packed = tl.load(weights + first[:, None] * 32 + word[None, :], mask=real_column[:, None], other=0)
    both = tl.load(scales + first, mask=real_column, other=0)
    wide = numbers(packed, both, COLUMNS).to(tl.float32) * factor(both)[:, None]
    to = out + column.to(tl.int64)[:, None] * n_in + group * 128 + depth[None, :]
    tl.store(to, wide.to(out.dtype.element_ty), mask=real_column[:, None])


def widened(weights: Tensor, scales: Tensor) -> Tensor:
    """Return the weights that `pack` has packed, as bfloat16 [out, in]."""
    n_groups, n_out, _ = weights.shape
    out = torch.empty(n_out, n_groups * GROUP, dtype=torch.bfloat16, device=weights.device)
    _widened[(cdiv(n_out, _COLUMNS), n_groups)](out, weights, scales, *out.shape, COLUMNS=_COLUMNS)
    return out
