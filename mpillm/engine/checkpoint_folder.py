"""Folders of safetensors: read without torch, written one tensor at a time, there under their name only when they are complete."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import struct
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from disagg.errors import ConfigError
from mpillm.engine.memory import shown
from mpillm.engine.quantization import RECORD
from mpillm.json_files import read_object

if TYPE_CHECKING:
    from torch import Tensor

# What a model's folder holds beside weights and config.json: tokenizer, chat template, generation config, licence.
_COMPANIONS = (
    *("generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("chat_template*", "*.model", "LICENSE*", "USE_POLICY*"),
)
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16  # of each file, for its digest
_ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1}


class Entry(NamedTuple):
    """A tensor that is going to be written."""

    dtype: str  # in safetensors' words
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        n = _ITEM_BYTES[self.dtype]
        for size in self.shape:
            n *= size
        return n


def read_header(file: Path) -> dict[str, dict[str, Any]]:
    """A safetensors file's tensors: dtype, shape, data_offsets. The file's size must be exactly what they add up to."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= min(_MAX_HEADER_BYTES, size):
                raise ConfigError(f"{file}: truncated, or not a safetensors file ({size} bytes)")
            raw = stream.read(length)
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    try:
        header: dict[str, Any] = json.loads(raw)
        header.pop("__metadata__", None)
        expected = 8 + length + max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
        if any(not {"dtype", "shape"} <= entry.keys() for entry in header.values()):
            raise ValueError
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise ConfigError(f"{file}: truncated, or not a safetensors file (its header cannot be read)") from None
    if size != expected:
        raise ConfigError(f"{file}: truncated: its header says {expected} bytes, it has {size}")
    return header


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that a model's index names, or the one that needs none; ConfigError if the index cannot be read."""
    index = folder / INDEX
    if not index.is_file():
        return [folder / SINGLE]
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ConfigError(f"{index}: no weight_map")
    return sorted({folder / str(name) for name in weight_map.values()})


@contextlib.contextmanager
def new_folder(target: Path, overwrite: bool) -> Iterator[Path]:
    """A folder to write in, which becomes `target` at the end, or is removed if that is not reached.

    ConfigError if `target` is there already and not to be replaced, or cannot be written.
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
            if target.exists():
                target.rename(old)
            work.rename(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written: {error.strerror}{f' ({error.filename})' if error.filename else ''}") from None


def digests(folder: Path) -> list[str]:
    """Of a model's weights, and of those that they were quantised from: of the files' names, sizes, headers, and some of their bytes.

    All bytes would mean to read a large model from end to end.
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


def check_room(folder: Path, n_bytes: int) -> None:
    """ConfigError if the disk of `folder` has less than `n_bytes` free."""
    free = shutil.disk_usage(folder).free
    if n_bytes > free:
        raise ConfigError(f"{folder.parent}: {shown(n_bytes)} are needed on this disk, and {shown(free)} are free")


def write_safetensors(file: Path, entries: Mapping[str, Entry], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """`tensors` come in any order and are written as they come: only one is in memory at a time.

    The format: https://github.com/huggingface/safetensors#format. Wide numbers come first, so that each lies where it can be used.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: -_ITEM_BYTES[item[1].dtype]):
        header[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [end, end + entry.n_bytes]}
        end += entry.n_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    missing = set(entries)
    with file.open("xb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors:
            entry = entries[name]
            if tuple(tensor.shape) != entry.shape or tensor.nbytes != entry.n_bytes:
                raise ValueError(f"{file}: {name} {tuple(tensor.shape)} of {tensor.nbytes} bytes is not {entry}")
            stream.seek(8 + len(text) + header[name]["data_offsets"][0])
            stream.write(memoryview(_bytes(tensor)))
            missing.remove(name)
        stream.flush()
        os.fsync(stream.fileno())
    if missing:
        raise ValueError(f"{file}: nothing was given for {', '.join(sorted(missing))}")


def copy_companions(source: Path, target: Path) -> None:
    """Everything of a model's folder but its weights and its `config.json`."""
    for pattern in _COMPANIONS:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, target / file.name)


def _bytes(tensor: Tensor) -> Any:
    import torch

    return tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
