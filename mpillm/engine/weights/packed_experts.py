"""Checkpoints that hold all experts of a layer in one tensor, as gpt-oss does: floats, or MXFP4.

Rows of gate and up alternate there. Floats are [experts, in, out]. MXFP4 (OCP Microscaling Formats, 1.0) is
[experts, out, in / 32, 16] bytes, each two numbers of 4 bits, and for each 32 numbers an exponent. The engine
computes with floats, which hold these numbers exactly. The names are those of transformers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from disagg.errors import ConfigError
from mpillm.engine.dtypes import STORED
from mpillm.engine.parallel.layout import ALL
from mpillm.engine.weights.entries import Entry

if TYPE_CHECKING:
    from torch import Tensor

    from mpillm.engine.model.model_config import ModelConfig

    _Read = Callable[[str, slice, slice], Tensor]

BLOCK = 32  # numbers with one exponent
_BYTES = BLOCK // 2
_NAME = re.compile(r"(.+[.]experts)[.](\d+)[.](gate_proj|up_proj|down_proj)[.](weight|bias)")
_BIAS, _NO_NUMBER = 127, 255  # of exponents


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
        if self._last is None or self._last[0] != (stored, expert):
            self._last = (stored, expert), self._matrix(stored, expert, read)
        return self._last[1][every][rows][:, columns].contiguous()

    def _matrix(self, name: str, expert: int, read: _Read) -> Tensor:
        """Return one expert's matrix: [out, in]."""
        if self._model.stored != "mxfp4":
            return _one(read, name, expert).t()
        scales = _one(read, f"{name}_scales", expert)
        if bool((scales == _NO_NUMBER).any()):
            raise ConfigError(f"tensor {name}_scales: expert {expert} has scales that are no number")
        return widened(_one(read, f"{name}_blocks", expert), scales)


def _one(read: _Read, name: str, expert: int) -> Tensor:
    return read(name, slice(expert, expert + 1), ALL)[0]


def widened(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers of MXFP4 as float32 [n, m]: blocks [n, m / 32, 16], scales [n, m / 32] (uint8)."""
    import torch

    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values = torch.tensor([*magnitudes, *(-x for x in magnitudes)], device=blocks.device)
    pairs: Any = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(2).int()  # the lower half first
    return torch.ldexp(values[pairs], scales.int()[..., None] - _BIAS).flatten(1)
