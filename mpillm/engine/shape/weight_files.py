"""The files of a model's weights, and their headers. Without torch, and without reading weights."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError
from mpillm.data.other_weights import other_weights
from mpillm.engine.shape.entries import ITEM_BYTES, Entry
from mpillm.files import LFS_POINTER, lfs_hint, n_values, read_object

INDEX = "model.safetensors.index.json"
_MAX_NAME = 255  # bytes of a name on Linux's file systems
SINGLE = "model.safetensors"
_SHARD = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
_MAX_SHARDS = 10_000
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit


def read_header(file: Path) -> dict[str, Entry]:
    """Read a safetensors file's header and compare it with the file's size.

    Raises ConfigError if it is damaged.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            if start == LFS_POINTER[:8]:
                raise ConfigError(f"{file}: {lfs_hint(file.parent)}")
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= min(_MAX_HEADER_BYTES, size):
                raise ConfigError(f"{file}: truncated, or not a safetensors file ({size} bytes)")
            raw = stream.read(length)
    except FileNotFoundError:
        is_named = (file.parent / INDEX).is_file()
        more = f", but {INDEX} names it; fetch it" if is_named else other_weights(file.parent)
        raise ConfigError(f"{file}: no such file{more}") from None
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    try:
        header: dict[str, Any] = json.loads(raw)
        header.pop("__metadata__", None)
        for entry in header.values():
            begin, end = entry["data_offsets"]
            if any(type(n) is not int or n < 0 for n in (begin, end - begin)):
                raise ValueError
            n, item = n_values(entry["shape"]), ITEM_BYTES.get(entry["dtype"])  # None: a type not read here
            if item is not None and item * n != end - begin:
                raise ValueError
        expected = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        entries = {name: Entry(str(entry["dtype"]), tuple(entry["shape"])) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        raise ConfigError(
            f"{file}: truncated, or not a safetensors file (its header cannot be read)"
        ) from None
    if size != expected:
        raise ConfigError(f"{file}: truncated: its header describes {expected} bytes, it has {size}")
    return entries


def weight_files(folder: Path) -> list[Path]:
    """Return a model's safetensors files: those in its index; without an index, its only file or all shards.

    Raises ConfigError if the index cannot be read.
    """
    index = folder / INDEX
    if not index.is_file():
        return [folder / SINGLE] if (folder / SINGLE).exists() else _shards(folder) or [folder / SINGLE]
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ConfigError(f"{index}: no weight_map")
    for name in weight_map.values():
        # An untrusted index must not choose among this machine's files. Links belong to the folder's owner.
        if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts:
            raise ConfigError(f"{index}: weight_map names {str(name)[:200]!r}, which is not in its folder")
        if not name.isprintable() or max(map(len, name.encode().split(b"/"))) > _MAX_NAME:
            raise ConfigError(f"{index}: weight_map names {name[:200]!r}, which is not a file name")
    return sorted({folder / name for name in weight_map.values()})


def _shards(folder: Path) -> list[Path]:
    """Return all files of a model whose index is missing; empty if none of them is there."""
    numbers = {int(match[2]) for file in folder.glob("model-*") if (match := _SHARD.fullmatch(file.name))}
    n = max(numbers, default=0)
    if not 0 < n <= _MAX_SHARDS:
        return []
    return [folder / f"model-{i:05}-of-{n:05}.safetensors" for i in range(1, n + 1)]


def has_tensor(folder: Path, name: str) -> bool:
    """Return whether the weights of a folder have this tensor; False without weights."""
    return any(name in read_header(file) for file in weight_files(folder) if file.is_file())
