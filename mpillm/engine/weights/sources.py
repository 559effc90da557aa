"""Sources of parameters: a checkpoint's safetensors, or seeded random numbers, complete or in slices."""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from disagg.errors import ConfigError
from mpillm.engine.shape.checkpoint_folder import checkpoint_files, stored_name
from mpillm.engine.shape.checkpoint_forms import form_of
from mpillm.engine.shape.entries import block_scale_name, checkpoint_name, is_linear, scale_name
from mpillm.engine.shape.layout import ALL
from mpillm.engine.shape.model_config import ModelConfig
from mpillm.engine.shape.tensor_shapes import tensor_shapes
from mpillm.engine.tensors.rounding import dequantize_blocks
from mpillm.telemetry.read_log import ReadLog


class WeightSource(Protocol):
    """Reads rows and columns of a parameter, by Hugging Face name, in the checkpoint's dtype."""

    def get(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Tensor: ...


class OpenFiles:
    """Safetensors files, each opened when it is first read."""

    def __init__(self) -> None:
        self._open: dict[Path, Any] = {}
        self._reads = ReadLog()

    def read(self, file: Path, name: str, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        """Return a tensor, or a part of it. Raises ConfigError if it cannot be read."""
        self._reads.note(file)
        try:
            if file not in self._open:
                self._open[file] = safe_open(file, framework="pt")
            name = stored_name(name, self._open[file].keys())
            stored = self._open[file].get_slice(name)
            if not stored.get_shape():  # a single number
                return cast(Tensor, self._open[file].get_tensor(name))
            tensor: Tensor = stored[rows] if columns == ALL else stored[rows, columns]
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{file}: tensor {name} cannot be read: {error}") from error
        return tensor


class Checkpoint:
    """The safetensors files of a folder."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        """Read only headers. Raises ConfigError as `checkpoint_files` does."""
        self._file_of = checkpoint_files(folder, config)
        self._files = OpenFiles()
        self._config = config
        self._form = form_of(config)
        # Number of rows that share a scale.
        self._one_scale_of = {scale_name(name): shape[0] for name, shape in tensor_shapes(config).items()}

    def get(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        if self._form is not None and self._form.holds(name):
            return self._form.get(name, rows, columns, self._read)
        if self._config.stored == "matrix" and name in self._one_scale_of:
            return self._read(name, ALL, ALL).reshape(1, 1).expand(self._one_scale_of[name], 1)[rows]
        tensor = self._read(checkpoint_name(name), rows, columns)
        if self._config.stored == "blocks" and is_linear(name):
            scales = self._read(block_scale_name(name), ALL, ALL)
            return dequantize_blocks(tensor, scales, rows, columns)
        return tensor

    def _read(self, name: str, rows: slice, columns: slice) -> Tensor:
        return self._files.read(self._file_of[name], name, rows, columns)


class DummyWeights:
    """Seeded random weights, nearly normal.

    A value depends only on its parameter's name, row and column, and only requested values are computed. A
    rank with a part of a parameter has the same numbers as a rank with the whole parameter.

    Row and column are hashed, combined and hashed again, as in counter-based generators (Salmon et al.,
    "Parallel Random Numbers: As Easy as 1, 2, 3"). The value is the sum of the hash's four bytes. Integers,
    one exact subtraction and one product give the same bits on any device. One CPU core computes 400 million
    values per second.

    The scales keep the residual stream near 1 and the embedding small against it, so that greedy decoding
    does not repeat itself.
    """

    def __init__(self, config: ModelConfig, device: torch.device | str = "cpu") -> None:
        """`device`: where the weights are computed."""
        self._shapes = tensor_shapes(config)
        self._device = torch.device(device)

    def get(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        if name.endswith(("k_scale", "v_scale")):  # of a KV cache
            return torch.ones(1, device=self._device)
        shape = self._shapes[name]
        if len(shape) == 1:
            fill = torch.zeros if name.endswith(".bias") else torch.ones
            return fill(shape, device=self._device)[rows]
        scale = 0.1 if "embed_tokens" in name else 1 / math.sqrt(shape[1])
        by_row, by_column = (
            self._hashed(torch.arange(n, dtype=torch.int32)[part], zlib.crc32(name.encode(), seed))
            for n, part, seed in ((shape[0], rows, 0), (shape[1], columns, 1))
        )
        values = torch.empty(len(by_row), len(by_column), device=self._device)
        n_rows = max(1, _CHUNK[self._device.type == "cpu"] // max(1, len(by_column)))
        for first in range(0, len(values), n_rows):
            x = _mixed(by_row[first : first + n_rows, None] ^ by_column)
            pairs = (x & 0x00FF00FF) + ((x >> 8) & 0x00FF00FF)
            sums = (pairs & 0xFFFF).add_(pairs >> 16)
            values[first : first + n_rows].copy_(sums).sub_(_MEAN).mul_(scale / _STDEV)
        return values

    def _hashed(self, places: Tensor, seed: int) -> Tensor:
        return _mixed(_mixed(places.to(self._device) + _signed(seed)))


_CHUNK = {True: 1 << 16, False: 1 << 26}  # values in one pass: fits a CPU's cache, keeps a device busy
_MEAN, _STDEV = 2 * 255, math.sqrt(4 * (256**2 - 1) / 12)  # of the sum of four random bytes


def _mixed(x: Tensor) -> Tensor:
    """Hash each number of x (int32, in place) by wrapping products and shifts."""
    x.mul_(_signed(0x7FEB352D))
    x.bitwise_xor_(x >> 15)
    return x.mul_(_signed(0x846CA68B))


def _signed(x: int) -> int:
    """Return the int32 with the same 32 bits."""
    return x - (1 << 32) if x >> 31 else x
