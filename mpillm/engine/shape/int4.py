"""Checkpoints of AWQ and GPTQ: weights of four bits, with a scale and a zero point for groups of inputs.

A weight is its number, from 0 to 15, minus the zero point, times the scale. In a checkpoint, `qweight` packs
eight numbers into an int32: AWQ packs eight outputs, in an order of its own, and GPTQ eight inputs. `qzeros`
packs the zero points of eight outputs; GPTQ's first format stores them minus 1. All tensors are [inputs,
outputs].

The engine reads the numbers by `blocks_name`, bytes [out, in / 2] with the first of two numbers in the lower
half. It reads scales and zero points by `scale_name`, float16 [out, groups, 2].
"""

from __future__ import annotations

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
_BLOCKS, _SCALES = blocks_name(""), scale_name("")
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of eight outputs in an int32


class Int4:
    """Implements `checkpoint_forms.Form` for the layers' linear projections."""

    def __init__(self, model: ModelConfig) -> None:
        self._model = model
        self._is_awq = model.stored == "awq"
        self._shapes = {name: shape for name, shape in tensor_shapes(model).items() if is_linear(name)}

    def holds(self, name: str) -> bool:
        """Return whether a parameter, or its blocks or scales, is stored in this form."""
        return _parameter(name) in self._shapes

    def entries(self) -> dict[str, Entry]:
        """Return the tensors of all projections."""
        entries = dict[str, Entry]()
        for name, (n_out, n_in) in self._shapes.items():
            prefix = name.removesuffix("weight")
            groups = 1 if self._model.group == -1 else -(-n_in // self._model.group)
            packed = (n_in, n_out // _EACH) if self._is_awq else (n_in // _EACH, n_out)
            entries[f"{prefix}qweight"] = Entry("I32", packed)
            entries[f"{prefix}qzeros"] = Entry("I32", (groups, n_out // _EACH))
            entries[f"{prefix}scales"] = Entry(STORED["float16"], (groups, n_out))
            if not self._is_awq:
                entries[f"{prefix}g_idx"] = Entry("I32", (n_in,))
        return entries

    def get(self, name: str, rows: slice, columns: slice, read: Read) -> Tensor:
        """Return floats, or the blocks or scales alone (see `WeightSource.get`)."""
        full = _parameter(name)
        prefix = full.removesuffix("weight")
        if name.endswith(_BLOCKS):
            return self._numbers(prefix, columns, read)[rows].contiguous()
        if name.endswith(_SCALES):
            return self._scales(full, columns, read)[rows].contiguous()
        return widened(*(self.get(part(full), rows, columns, read) for part in (blocks_name, scale_name)))

    def _numbers(self, prefix: str, columns: slice, read: Read) -> Tensor:
        packed = read(f"{prefix}qweight", in_units(columns, 1 if self._is_awq else _EACH), ALL)
        numbers = _unpacked(packed, _AWQ_PLACES) if self._is_awq else _unpacked(packed.t(), range(_EACH)).t()
        return (numbers[::2] | numbers[1::2] << 4).t()

    def _scales(self, name: str, columns: slice, read: Read) -> Tensor:
        """Return scales and zero points of complete groups, `int4_group` inputs each."""
        import torch

        prefix, model = name.removesuffix("weight"), self._model
        n_in = self._shapes[name][1]
        if not self._is_awq:
            group = n_in if model.group == -1 else model.group
            if not torch.equal(read(f"{prefix}g_idx", ALL, ALL), torch.arange(n_in).int() // group):
                raise ConfigError(f"tensor {prefix}g_idx: inputs are in another order (desc_act)")
        scales = read(f"{prefix}scales", ALL, ALL).half()
        zeros = _unpacked(read(f"{prefix}qzeros", ALL, ALL), _AWQ_PLACES if self._is_awq else range(_EACH))
        both = torch.stack([scales.t(), (zeros.t() + (model.stored == "gptq")).half()], dim=-1)
        engine_group = int4_group(model)
        if model.group == -1:
            both = both.expand(-1, n_in // engine_group, -1)
        return both[:, in_units(columns, engine_group)]


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
    zeros = torch.full_like(scales, 8)
    numbers = (groups / scales.float()).round_().add_(8).clamp_(0, 15).to(torch.uint8).flatten(1)
    return numbers[:, ::2] | numbers[:, 1::2] << 4, torch.cat([scales, zeros], dim=-1)
