"""Checkpoints with weights of four bits, with a scale and a zero point for groups of inputs.

A weight is its number, from 0 to 15, minus the zero point, times the scale. Checkpoints pack eight numbers
into an int32:

- AWQ and GPTQ: all tensors are [inputs, outputs]. `qweight` packs eight outputs (AWQ, in an order of its own)
  or eight inputs (GPTQ). `qzeros` packs the zero points of eight outputs. GPTQ's first format stores them
  minus 1.
- `pack-quantized` of compressed-tensors: all tensors are [outputs, inputs]. `weight_packed` packs eight
  inputs, `weight_zero_point` the zero points of eight outputs. Symmetric checkpoints have no zero points:
  all are 8.

The engine reads the numbers by `blocks_name`, bytes [out, in / 2] with the first of two numbers in the lower
half. It reads scales and zero points by `scale_name`, float16 [out, groups, 2]. So bfloat16 scales from 8e-6
to 65,504 keep their bits. Smaller ones are rounded, larger ones are an error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from disagg.errors import ConfigError
from mpillm.engine.shape.dtypes import STORED
from mpillm.engine.shape.entries import Entry, blocks_name, int4_group, is_linear, scale_name
from mpillm.engine.shape.layout import ALL
from mpillm.engine.shape.model_config import ModelConfig
from mpillm.engine.shape.tensor_shapes import tensor_shapes

if TYPE_CHECKING:
    from torch import Tensor

    Read = Callable[[str, slice, slice], Tensor]

_EACH = 8  # numbers in an int32
_MIDDLE = 8  # the zero point of symmetric groups
_BLOCKS, _SCALES = blocks_name(""), scale_name("")
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of eight outputs in an int32


class Int4(ABC):
    """Implements `checkpoint_forms.Form` for the layers' linear projections."""

    def __init__(self, model: ModelConfig) -> None:
        self._model = model
        self._shapes = {name: shape for name, shape in tensor_shapes(model).items() if is_linear(name)}

    def holds(self, name: str) -> bool:
        """Return whether a parameter, or its blocks or scales, is stored in this form."""
        return _parameter(name) in self._shapes

    def entries(self) -> dict[str, Entry]:
        """Return the tensors of all projections."""
        entries = dict[str, Entry]()
        for name, (n_out, n_in) in self._shapes.items():
            entries |= self._entries(name, n_out, n_in, -(-n_in // self._group(n_in)))
        return entries

    def get(self, name: str, rows: slice, columns: slice, read: Read) -> Tensor:
        """Return floats, or the blocks or scales alone (see `WeightSource.get`)."""
        full = _parameter(name)
        if name.endswith(_BLOCKS):
            return self._numbers(full, columns, read)[rows].contiguous()
        if name.endswith(_SCALES):
            return self._scales(full, columns, read)[rows].contiguous()
        return widened(*(self.get(part(full), rows, columns, read) for part in (blocks_name, scale_name)))

    def _group(self, n_in: int) -> int:
        return n_in if self._model.group == -1 else self._model.group

    def _scales(self, name: str, columns: slice, read: Read) -> Tensor:
        """Return scales and zero points of complete groups, `int4_group` inputs each."""
        import torch

        n_in = self._shapes[name][1]
        stored, zeros = self._stored_scales(name, read)
        scales = stored.half()
        if scales.isinf().any():
            raise ConfigError(f"tensor {name}: scales above 65504, the largest float16")
        both = torch.stack([scales, zeros.half()], dim=-1)
        engine_group = int4_group(self._model)
        if self._model.group == -1:
            both = both.expand(-1, n_in // engine_group, -1)
        return both[:, in_units(columns, engine_group)]

    @abstractmethod
    def _entries(self, name: str, n_out: int, n_in: int, groups: int) -> dict[str, Entry]:
        """Return the tensors of a projection."""

    @abstractmethod
    def _numbers(self, name: str, columns: slice, read: Read) -> Tensor:
        """Return the blocks of all outputs."""

    @abstractmethod
    def _stored_scales(self, name: str, read: Read) -> tuple[Tensor, Tensor]:
        """Return scales (floats) and zero points (uint8): [out, groups]."""


class AwqOrGptq(Int4):
    @property
    def _is_awq(self) -> bool:
        return self._model.stored == "awq"

    def _entries(self, name: str, n_out: int, n_in: int, groups: int) -> dict[str, Entry]:
        prefix = name.removesuffix("weight")
        entries = {
            f"{prefix}qweight": Entry(
                "I32", (n_in, n_out // _EACH) if self._is_awq else (n_in // _EACH, n_out)
            ),
            f"{prefix}qzeros": Entry("I32", (groups, n_out // _EACH)),
            f"{prefix}scales": Entry(STORED["float16"], (groups, n_out)),
        }
        if not self._is_awq:
            entries[f"{prefix}g_idx"] = Entry("I32", (n_in,))
        return entries

    def _numbers(self, name: str, columns: slice, read: Read) -> Tensor:
        prefix = name.removesuffix("weight")
        packed = read(f"{prefix}qweight", in_units(columns, 1 if self._is_awq else _EACH), ALL)
        numbers = _unpacked(packed, _AWQ_PLACES) if self._is_awq else _unpacked(packed.t(), range(_EACH)).t()
        return (numbers[::2] | numbers[1::2] << 4).t()

    def _stored_scales(self, name: str, read: Read) -> tuple[Tensor, Tensor]:
        import torch

        prefix, n_in = name.removesuffix("weight"), self._shapes[name][1]
        if not self._is_awq:
            in_order = torch.arange(n_in).int() // self._group(n_in)
            if not torch.equal(read(f"{prefix}g_idx", ALL, ALL), in_order):
                raise ConfigError(f"tensor {prefix}g_idx: inputs are in another order (desc_act)")
        scales = read(f"{prefix}scales", ALL, ALL)
        zeros = _unpacked(read(f"{prefix}qzeros", ALL, ALL), _AWQ_PLACES if self._is_awq else range(_EACH))
        return scales.t(), zeros.t() + (self._model.stored == "gptq")


class PackQuantized(Int4):
    def _entries(self, name: str, n_out: int, n_in: int, groups: int) -> dict[str, Entry]:
        entries = {
            f"{name}_packed": Entry("I32", (n_out, n_in // _EACH)),
            f"{name}_scale": Entry(STORED["float16"], (n_out, groups)),
        }
        if self._model.stored == "packed":
            entries[f"{name}_zero_point"] = Entry("I32", (-(-n_out // _EACH), groups))
        return entries

    def _numbers(self, name: str, columns: slice, read: Read) -> Tensor:
        import torch

        # The bytes of these words are blocks.
        return read(f"{name}_packed", ALL, in_units(columns, _EACH)).contiguous().view(torch.uint8)

    def _stored_scales(self, name: str, read: Read) -> tuple[Tensor, Tensor]:
        import torch

        scales = read(f"{name}_scale", ALL, ALL)
        if self._model.stored == "packed symmetric":
            return scales, torch.full(scales.shape, _MIDDLE, dtype=torch.uint8)
        zeros = _unpacked(read(f"{name}_zero_point", ALL, ALL).t(), range(_EACH)).t()
        return scales, zeros[: len(scales)]


def int4_form(model: ModelConfig) -> Int4:
    """Return the form of an int4 checkpoint."""
    return PackQuantized(model) if model.stored.startswith("packed") else AwqOrGptq(model)


def in_units(part: slice, size: int) -> slice:
    """Convert a slice of items, which holds whole units of `size` items, to a slice of units."""
    return slice(*(None if end is None else end // size for end in (part.start, part.stop)))


def _parameter(name: str) -> str:
    return name.removesuffix(_BLOCKS).removesuffix(_SCALES)


def _unpacked(packed: Tensor, places: range | tuple[int, ...]) -> Tensor:
    """Return the numbers in int32 [n, m]: uint8 [n, 8 m]."""
    import torch

    shifts = 4 * torch.tensor(places, dtype=torch.int32)
    return (packed[:, :, None] >> shifts & 15).flatten(1).to(torch.uint8)


def widened(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the weights as float32 [out, in], exactly.

    Rounded to float16, they equal the weights of the reference implementations.
    """
    from mpillm.engine.shape.mxfp4 import numbers_of

    numbers = numbers_of(blocks).float().view(len(blocks), scales.shape[1], -1)
    weights: Tensor = (numbers - scales[..., 1:].float()) * scales[..., :1].float()
    return weights.flatten(1)


def rounded(matrix: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return bytes and scales nearest to `matrix` [n, m]: symmetric, a group's largest becomes 7 or -7."""
    import torch

    groups = matrix.float().view(len(matrix), -1, group)
    largest = groups.abs().amax(-1, keepdim=True)
    scales = torch.where(largest == 0, 1.0, largest / 7).half()
    zeros = torch.full_like(scales, _MIDDLE)
    numbers = (groups / scales.float()).round_().add_(_MIDDLE).clamp_(0, 15).to(torch.uint8).flatten(1)
    return numbers[:, ::2] | numbers[:, 1::2] << 4, torch.cat([scales, zeros], dim=-1)
