"""Folders of safetensors: read without torch, written tensor by tensor, renamed once complete."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import struct
import uuid
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError
from mpillm.engine.shape.checkpoint_forms import form_of
from mpillm.engine.shape.dtypes import CHECKPOINT_DTYPES
from mpillm.engine.shape.entries import (
    ITEM_BYTES,
    NO_NUMBER,
    TRANSFORMER,
    Entry,
    in_checkpoint,
    kv_scale_alias,
    kv_scale_names,
)
from mpillm.engine.shape.memory import gibibytes
from mpillm.engine.shape.model_config import ModelConfig
from mpillm.engine.shape.quantization import RECORD
from mpillm.engine.shape.tensor_shapes import tensor_shapes
from mpillm.engine.shape.weight_files import read_header, weight_files
from mpillm.files import read_object, replace_folder

if TYPE_CHECKING:
    from torch import Tensor

# A model's other files: tokenizer, chat template, generation config, licence.
_COMPANIONS = (
    *("generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template*", "*.model", "LICENSE*", "USE_POLICY*"),
)
_PARAMETER = re.compile(r"model\.layers\.(\d+)\..*\.(weight|bias)")
_LARGEST_BIAS = 1 << 20
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16  # of each file, for its digest


@contextlib.contextmanager
def new_folder(target: Path, overwrite: bool) -> Iterator[Path]:
    """Yield a folder to write in. It becomes `target` at the end, or is removed after an error.

    Raises ConfigError if `target` exists and must not be replaced, or cannot be written.
    """
    target = target.absolute()
    if target.exists() and not overwrite:
        raise ConfigError(f"{target}: exists already")
    unique = uuid.uuid4().hex[:12]
    work, old = target.parent / f".{target.name}.{unique}", target.parent / f".{target.name}.{unique}.old"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work.mkdir()
        try:
            yield work
            replace_folder(work, target, old)
        finally:
            shutil.rmtree(work, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise ConfigError(
            f"{target}: cannot be written: {error.strerror}{f' ({error.filename})' if error.filename else ''}"
        ) from None


def digests(folder: Path) -> list[str]:
    """Return digests of a model's weights, and of the weights that they were quantized from.

    The digests cover the files' names, sizes, headers and some bytes: hashing all bytes would read a large
    model from end to end.
    """
    state = hashlib.sha256()
    for file in weight_files(folder):
        size = file.stat().st_size
        state.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            for at in (0, *(size * i // _SAMPLES for i in range(1, _SAMPLES))):
                stream.seek(at)
                state.update(stream.read(_SAMPLE_BYTES))
    record = folder / RECORD
    return [state.hexdigest(), *(read_object(record).get("source_digests", []) if record.is_file() else [])]


def check_disk_space(folder: Path, n_bytes: int) -> None:
    """Raise ConfigError if the disk of `folder` has less than `n_bytes` free."""
    free = shutil.disk_usage(folder).free
    if n_bytes > free:
        raise ConfigError(
            f"{folder.parent}: {gibibytes(n_bytes)} are needed on this disk, and {gibibytes(free)} are free"
        )


def write_safetensors(
    file: Path, entries: Mapping[str, Entry], tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Write `tensors`, in any order, as they come: only one is in memory at a time.

    The format: https://github.com/huggingface/safetensors#format. Wide types come first, so that each is
    aligned.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: -ITEM_BYTES[item[1].dtype]):
        offsets = [end, end + entry.n_bytes]
        header[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": offsets}
        end += entry.n_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    missing = set(entries)
    with file.open("xb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors:
            entry = entries[name]
            if tuple(tensor.shape) != entry.shape or tensor.nbytes != entry.n_bytes:
                raise ValueError(
                    f"{file}: {name} {tuple(tensor.shape)} of {tensor.nbytes} bytes is not {entry}"
                )
            stream.seek(8 + len(text) + header[name]["data_offsets"][0])
            stream.write(memoryview(_bytes(tensor)))
            missing.remove(name)
        stream.flush()
        os.fsync(stream.fileno())
    if missing:
        raise ValueError(f"{file}: nothing was given for {', '.join(sorted(missing))}")


def copy_companions(source: Path, target: Path) -> None:
    """Copy a model's tokenizer and other companion files, without weights and `config.json`."""
    for pattern in _COMPANIONS:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, target / file.name)


def _bytes(tensor: Tensor) -> Any:
    import torch

    return tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy()


def check_scales(files: Mapping[str, Path]) -> None:
    """Raise ConfigError unless the scales among the tensors `files` are finite and not negative."""
    by_file: dict[Path, list[str]] = {}
    for name, file in files.items():
        if name.endswith(("_scale", "_scale_inv", ".scales", "_scales")):
            by_file.setdefault(file, []).append(name)
    for file, names in by_file.items():
        for name, dtype, data in _stored(file, names):
            if dtype == "U8":  # exponents
                is_fine = NO_NUMBER not in data
            else:
                numbers = _floats(data, dtype)
                is_fine = bool((np.isfinite(numbers) & (numbers >= 0)).all())
            if not is_fine:
                raise ConfigError(f"{file}: tensor {name} has scales that are negative or not finite")


def stored_name(name: str, tensors: Container[str]) -> str:
    """Return a tensor's name in a file with these `tensors`, which `checkpoint_files` has accepted."""
    if name in tensors:
        return name
    return next(other for other in (f"{TRANSFORMER}{name}", kv_scale_alias(name)) if other in tensors)


def _floats(data: bytes, dtype: str) -> NDArray[Any]:
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, {"F32": "<f4", "F16": "<f2"}[dtype])


def checkpoint_files(folder: Path, model: ModelConfig) -> dict[str, Path]:
    """Return the file of every tensor of `model`.

    Raises ConfigError if a tensor is missing, truncated, or of a wrong shape or type, or if the folder's
    layers have parameters that `model` does not have.
    """
    files = weight_files(folder)
    stored = {name: (file, entry) for file in files for name, entry in read_header(file).items()}
    form = form_of(model)
    expected: dict[str, Entry] = {} if form is None else form.entries()
    for name, shape in tensor_shapes(model).items():
        if form is None or not form.holds(name):
            expected |= in_checkpoint(name, shape, model)
    for name in expected:
        if name not in stored and (other := f"{TRANSFORMER}{name}") in stored:
            stored[name] = stored[other]
    if model.kv_quantization != "none":
        for name in (name for layer in range(model.n_layers) for name in kv_scale_names(layer)):
            if name not in stored and kv_scale_alias(name) in stored:
                stored[name] = stored[kv_scale_alias(name)]
            # One number, or one for each KV head, as a tensor of any shape.
            shape = stored[name][1].shape if name in stored else (1,)
            is_one = math.prod(shape) in (1, model.n_kv_heads)
            expected[name] = Entry("F32", shape if is_one else (model.n_kv_heads,))
    floats = tuple(CHECKPOINT_DTYPES)  # any of them, even for scales
    for name, entry in expected.items():
        if name not in stored:
            raise ConfigError(f"{folder}: no tensor {name} in {', '.join(file.name for file in files)}")
        file, (dtype, shape) = stored[name]
        is_one = entry.shape == () and math.prod(shape) == 1  # in any number of dimensions
        if shape != entry.shape and not is_one:
            raise ConfigError(
                f"{file}: tensor {name} has shape {list(shape)}, config.json makes it {list(entry.shape)}"
            )
        allowed = floats if entry.dtype in floats else (entry.dtype,)
        if dtype not in allowed:
            raise ConfigError(f"{file}: tensor {name} is of type {dtype}; can read {', '.join(allowed)}")
    _check_others({name: place for name, place in stored.items() if name not in expected}, model)
    return {name: stored[name][0] for name in expected}


def _check_others(others: Mapping[str, tuple[Path, Entry]], model: ModelConfig) -> None:
    """Raise ConfigError if tensors that a model does not read are another model's layer parameters.

    A bias of zeros does not count, because some tools write one for each product. Layers after the last layer
    of a model with latents do not count: they are draft layers.
    """
    for name, (file, entry) in others.items():
        match = _PARAMETER.fullmatch(name)
        if match is None or (model.latent is not None and int(match[1]) >= model.n_layers):
            continue
        is_small_bias = match[2] == "bias" and math.prod(entry.shape) <= _LARGEST_BIAS
        if is_small_bias and not any(any(data) for _, _, data in _stored(file, [name])):
            continue
        raise ConfigError(
            f"{file}: config.json describes no model that has the tensor {name}; without it a run would give"
            " other tokens"
        )


def _stored(file: Path, names: Iterable[str]) -> Iterator[tuple[str, str, bytes]]:
    """Yield name, type and bytes of some tensors in a file."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
        for name in names:
            entry = header[stored_name(name, header)]
            start, end = entry["data_offsets"]
            stream.seek(8 + length + start)
            yield name, entry["dtype"], stream.read(end - start)
