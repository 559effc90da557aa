"""Checkpoints that hold all experts of a layer in one tensor, as gpt-oss does: floats, or MXFP4.

Rows of gate and up alternate there. Floats are [experts, in, out]. MXFP4 (see `mxfp4`) is [experts, out,
in / 32, 16] bytes, and an exponent for each 32 numbers. A parameter in it can be had as floats, which hold
these numbers exactly, or as it is, by `blocks_name` and `scale_name`. The names are those of transformers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from disagg.errors import ConfigError
from mpillm.engine.dtypes import STORED
from mpillm.engine.parallel.layout import ALL
from mpillm.engine.weights.entries import BLOCK, Entry, blocks_name, scale_name

if TYPE_CHECKING:
    from torch import Tensor

    from mpillm.engine.model.model_config import ModelConfig

    _Read = Callable[[str, slice, slice], Tensor]

_BYTES = BLOCK // 2
_BLOCKS, _SCALES = blocks_name("weight"), scale_name("weight")
_NAME = re.compile(
    rf"(.+[.]experts)[.](\d+)[.](gate_proj|up_proj|down_proj)[.](weight|bias|{_BLOCKS}|{_SCALES})"
)


class PackedExperts:
    """Implements `checkpoint_forms.Form` for parameters of single experts."""

    def __init__(self, model: ModelConfig) -> None:
        self._model = model
        self._last: tuple[tuple[str, int], Tensor] | None = None  # gate and up are asked for in turn

    def holds(self, name: str) -> bool:
        """Return whether a parameter is an expert's."""
        return _NAME.fullmatch(name) is not None

    def entries(self) -> dict[str, Entry]:
        """Return the tensors of all layers' experts."""
        model, made = self._model, dict[str, Entry]()
        n, h, inner = model.n_experts, model.hidden_size, model.intermediate_size
        for layer in range(model.n_layers):
            for part, n_out, n_in in (("gate_up_proj", 2 * inner, h), ("down_proj", h, inner)):
                name = f"model.layers.{layer}.mlp.experts.{part}"
                if model.stored == "mxfp4":
                    made[f"{name}_blocks"] = Entry("U8", (n, n_out, n_in // BLOCK, _BYTES))
                    made[f"{name}_scales"] = Entry("U8", (n, n_out, n_in // BLOCK))
                else:
                    made[name] = Entry(STORED[model.dtype], (n, n_in, n_out))
                made[f"{name}_bias"] = Entry(STORED[model.dtype], (n, n_out))
        return made

    def get(self, name: str, rows: slice, columns: slice, read: _Read) -> Tensor:
        """As `WeightSource.get`."""
        found = _NAME.fullmatch(name)
        assert found is not None
        prefix, expert, part, kind = found[1], int(found[2]), found[3], found[4]
        every = ALL if part == "down_proj" else slice(part == "up_proj", None, 2)
        stored = f"{prefix}.{part if part == 'down_proj' else 'gate_up_proj'}"
        if kind == "bias":
            return _one(read, f"{stored}_bias", expert)[every][rows].contiguous()
        if kind == _BLOCKS:
            blocks = _one(read, f"{stored}_blocks", expert)[every][rows]
            return blocks[:, _in_blocks(columns)].flatten(1)
        if kind == _SCALES:
            return self._scales(stored, expert, read)[every][rows][:, _in_blocks(columns)].contiguous()
        if self._last is None or self._last[0] != (stored, expert):
            self._last = (stored, expert), self._matrix(stored, expert, read)
        return self._last[1][every][rows][:, columns].contiguous()

    def _matrix(self, name: str, expert: int, read: _Read) -> Tensor:
        """Return one expert's matrix as floats: [out, in]."""
        from mpillm.engine.weights.mxfp4 import widened

        if self._model.stored != "mxfp4":
            return _one(read, name, expert).t()
        return widened(_one(read, f"{name}_blocks", expert).flatten(1), self._scales(name, expert, read))

    def _scales(self, name: str, expert: int, read: _Read) -> Tensor:
        from mpillm.engine.weights.mxfp4 import NO_NUMBER

        scales = _one(read, f"{name}_scales", expert)
        if bool((scales == NO_NUMBER).any()):
            raise ConfigError(f"tensor {name}_scales: expert {expert} has scales that are no number")
        return scales


def _in_blocks(columns: slice) -> slice:
    """Return whole blocks of columns."""
    return slice(*(None if end is None else end // BLOCK for end in (columns.start, columns.stop)))


def _one(read: _Read, name: str, expert: int) -> Tensor:
    return read(name, slice(expert, expert + 1), ALL)[0]
