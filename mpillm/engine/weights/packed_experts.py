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

BLOCK = 32  # numbers with one exponent
_BYTES = BLOCK // 2
_NAME = re.compile(r"(.+[.]experts)[.](\d+)[.](gate_proj|up_proj|down_proj)[.](weight|bias)")
_BIAS, _NO_NUMBER = 127, 255  # of exponents


def is_packed(name: str, model: ModelConfig) -> bool:
    """Return whether a parameter of `model` is a part of a tensor of all experts."""
    experts = model.family.experts
    return experts is not None and experts.packed and _NAME.fullmatch(name) is not None


def packed_entries(model: ModelConfig) -> dict[str, Entry]:
    """Return the tensors of all layers' experts."""
    experts, n = model.family.experts, model.n_experts
    made: dict[str, Entry] = {}
    if experts is None or not experts.packed:
        return made
    h, inner = model.hidden_size, model.intermediate_size
    for layer in range(model.n_layers):
        for part, n_out, n_in in (("gate_up_proj", 2 * inner, h), ("down_proj", h, inner)):
            name = f"model.layers.{layer}.{experts.prefix}.experts.{part}"
            if model.stored == "mxfp4":
                made[f"{name}_blocks"] = Entry("U8", (n, n_out, n_in // BLOCK, _BYTES))
                made[f"{name}_scales"] = Entry("U8", (n, n_out, n_in // BLOCK))
            else:
                made[name] = Entry(STORED[model.dtype], (n, n_in, n_out))
            made[f"{name}_bias"] = Entry(STORED[model.dtype], (n, n_out))
    return made


class PackedExperts:
    """Implements `WeightSource` for parameters of single experts."""

    def __init__(self, model: ModelConfig, read: Callable[[str, int], Tensor]) -> None:
        """`read` returns one expert's part of a tensor of all."""
        self._read, self._stored = read, model.stored
        self._last: tuple[tuple[str, int], Tensor] | None = None  # gate and up are asked for in turn

    def get(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        found = _NAME.fullmatch(name)
        assert found is not None
        prefix, expert, part, kind = found[1], int(found[2]), found[3], found[4]
        every = ALL if part == "down_proj" else slice(part == "up_proj", None, 2)
        stored = f"{prefix}.{part if part == 'down_proj' else 'gate_up_proj'}"
        if kind == "bias":
            return self._read(f"{stored}_bias", expert)[every][rows].contiguous()
        return self._matrix(stored, expert)[every][rows][:, columns].contiguous()

    def _matrix(self, name: str, expert: int) -> Tensor:
        """Return one expert's matrix: [out, in]."""
        if self._last is None or self._last[0] != (name, expert):
            self._last = (name, expert), self._made(name, expert)
        return self._last[1]

    def _made(self, name: str, expert: int) -> Tensor:
        if self._stored != "mxfp4":
            return self._read(name, expert).t()
        scales = self._read(f"{name}_scales", expert)
        if bool((scales == _NO_NUMBER).any()):
            raise ConfigError(f"tensor {name}_scales: expert {expert} has scales that are no number")
        return widened(self._read(f"{name}_blocks", expert), scales)


def widened(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers of MXFP4 as float32 [n, m]: blocks [n, m / 32, 16], scales [n, m / 32] (uint8)."""
    import torch

    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values = torch.tensor([*magnitudes, *(-x for x in magnitudes)], device=blocks.device)
    pairs: Any = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(2).int()  # the lower half first
    return torch.ldexp(values[pairs], scales.int()[..., None] - _BIAS).flatten(1)
