"""Conversion of a GGUF file to a Hugging Face folder with fp32 weights.

`gguf_config` converts the configuration, `gguf_tokenizer` the tokenizer.

`transformers` also reads GGUF, but it needs PyTorch and accelerate, takes 20 seconds, and drops the
tokenizer's rule for splitting text. This module takes 5 seconds. A test compares this module's weights with
those of `transformers`, bit by bit.
"""

from __future__ import annotations

import json
import mmap
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError
from disagg.text_file import check_file
from mpillm.data.gguf_config import PACKED, Metadata, architecture_of, config_of
from mpillm.data.gguf_tokenizer import tokenizer_config, tokenizer_of
from mpillm.files import DATA_ERRORS, LFS_POINTER, lfs_hint

FILES = (
    *("config.json", "generation_config.json", "model.safetensors"),
    *("tokenizer.json", "tokenizer_config.json"),
)
NEEDS = ("gguf", "safetensors", "tokenizers")  # the modules of the `models` extra that the conversion imports

_EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
_ITEM_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes, by GGUF type
_STRING, _ARRAY = 8, 9
_ROPE_FACTORS = "rope_freqs"  # a tensor that only `config_of` reads
_RESERVE = 64 << 20  # bytes of disk for the files beside the weights


def convert(source: Path, target: Path, more: Sequence[Path] = ()) -> None:
    """Write `FILES` into the folder `target`. Raises ConfigError if the GGUF file cannot be converted.

    `more`: the other files of a split model, whose first is `source`.
    """
    tensors, metadata = _read(source)
    tensors += [tensor for file in more for tensor in _read(file)[0]]
    n_parts, n_tensors = metadata.get("split.count", 1), metadata.get("split.tensors.count", len(tensors))
    by_name = {tensor.name: tensor for tensor in tensors}
    if n_parts != 1 + len(more):
        raise ConfigError(
            f"{source} is one of {n_parts} files of a model; their names must end in"
            f" -00001-of-{n_parts:05}.gguf and so on"
        )
    if not n_tensors == len(by_name) == len(tensors):
        raise ConfigError(
            f"{source}: the model's files have {len(tensors)} tensors, {len(by_name)} of them different, and"
            f" should have {n_tensors}; fetch all files again"
        )
    values = Metadata(source, metadata)
    try:
        factors = by_name.get(f"{_ROPE_FACTORS}.weight")
        config = config_of(values, "output.weight" not in by_name, None if factors is None else factors.data)
        _write_json(target / "config.json", config)
        generation = {key: config[key] for key in config if key.endswith("_token_id")}
        _write_json(target / "generation_config.json", generation)
        tokenizer_of(values).save(str(target / "tokenizer.json"))
        _write_json(target / "tokenizer_config.json", tokenizer_config(values))
    except KeyError as error:
        raise ConfigError(f"{source} has no {error.args[0]}, which the conversion needs") from error
    except ConfigError:
        raise
    except DATA_ERRORS as error:
        raise ConfigError(f"{source} is damaged: {type(error).__name__}: {error}") from error
    try:
        _write_weights(values, tensors, config, target / "model.safetensors")
    except ConfigError:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"{source} has weights that are damaged: {error}") from error
    # safetensors writes a file that only its owner can read.
    shutil.copymode(target / "config.json", target / "model.safetensors")


def _read(file: Path) -> tuple[list[Any], dict[str, Any]]:
    """Return the tensors and metadata of a GGUF file. Raises ConfigError if it is damaged."""
    import gguf

    check_file(file)
    with file.open("rb") as stream:
        if stream.read(len(LFS_POINTER)) == LFS_POINTER:
            raise ConfigError(f"{file}: {lfs_hint(file.parent)}")
    try:
        size = _check_counts(file)
        reader = gguf.GGUFReader(file)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        if sum(int(tensor.n_bytes) for tensor in reader.tensors) > size:
            raise ValueError("tensors that overlap")
    except (ValueError, KeyError, IndexError) as error:
        raise ConfigError(f"{file} is not a GGUF file that we can read: {error}") from error
    return reader.tensors, metadata


def _check_counts(source: Path) -> int:
    """Check the header and return the file's size. Raises ValueError for a count beyond the file's end.

    The package gguf does not check counts, and does not stop at the file's end.
    """
    with source.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = 4
        order: Literal["little", "big"] = "big" if data[4:6] == b"\0\0" else "little"

        def skip(n: int) -> None:
            nonlocal at
            at += n
            if at > len(data):
                raise ValueError("its header has more than the file")

        def number(width: int) -> int:
            skip(width)
            return int.from_bytes(data[at - width : at], order)

        def value(kind: int) -> None:
            if kind == _STRING:
                skip(number(8))
            elif kind == _ARRAY:
                of, n = number(4), number(8)
                if of == _ARRAY:
                    raise ValueError("it has arrays in an array")
                if of != _STRING:
                    skip(n * _ITEM_BYTES[of])
                else:
                    for _ in range(n):
                        skip(number(8))
            else:
                skip(_ITEM_BYTES[kind])

        number(4)  # version
        n_tensors, n_values = number(8), number(8)
        for _ in range(n_values):
            skip(number(8))
            value(number(4))
        for _ in range(n_tensors):
            skip(number(8))
            skip(8 * number(4) + 4 + 8)  # dimensions, type, offset
        return len(data)


def _write_weights(metadata: Metadata, tensors: list[Any], config: dict[str, Any], target: Path) -> None:
    import gguf
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    size = 4 * sum(int(tensor.n_elements) for tensor in tensors)
    if (free := shutil.disk_usage(target.parent).free) < size + _RESERVE:
        needed = f"the weights need {(size + _RESERVE) >> 20} MB"
        raise ConfigError(f"{needed} and the disk of {target.parent} has {free >> 20} MB free")
    architecture = architecture_of(metadata)
    heads = {}
    if architecture.permutes:
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights: dict[str, NDArray[np.float32]] = {}
    experts: dict[str, dict[str, NDArray[np.float32]]] = {}  # for `_packed`, by layer and kind
    for tensor in tensors:
        layer, name, kind = _split_name(tensor.name, architecture.layers)
        if name == _ROPE_FACTORS:
            continue
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if name in _EXPERTS and architecture.experts:
            if architecture.experts == PACKED:
                experts.setdefault(f"{layer}{kind}", {})[name] = values
                continue
            prefix, *matrices = architecture.experts
            matrix = matrices[_EXPERTS.index(name)]
            weights |= {f"{layer}{prefix}.{i}.{matrix}.{kind}": one for i, one in enumerate(values)}
            continue
        if name not in architecture.tensors or (kind == "bias" and not architecture.biases):
            raise ConfigError(
                f"{metadata.source} has a tensor {tensor.name!r}, which a {metadata.architecture} model does"
                " not have"
            )
        if name in heads:
            values = _unpermute(values, heads[name])
        if name in architecture.turned:
            values = values.T  # a bias has one dimension, and stays the same
        if architecture.norms_add_one and name.endswith("norm"):
            values = values - 1
        weights[f"{layer}{architecture.tensors[name]}{'' if name == 'attn_sinks' else f'.{kind}'}"] = values
    weights |= _packed(experts)
    try:
        arrays = {name: np.ascontiguousarray(values) for name, values in weights.items()}
        save_file(arrays, target, metadata={"format": "pt"})
    except SafetensorError as error:
        raise ConfigError(f"cannot write {target}: {error}") from error


def _packed(experts: dict[str, dict[str, NDArray[np.float32]]]) -> dict[str, NDArray[np.float32]]:
    """Return gpt-oss's expert tensors: gate and up columns alternate, and rows are inputs."""
    tensors: dict[str, NDArray[np.float32]] = {}
    for place, parts in experts.items():
        layer, kind = place.rsplit(".", 1)
        gate, up, down = (parts[name] for name in _EXPERTS)
        both = np.stack([gate, up], axis=2).reshape(len(gate), -1, *gate.shape[2:])
        suffix = "" if kind == "weight" else "_bias"
        if kind == "weight":
            both, down = both.swapaxes(1, 2), down.swapaxes(1, 2)
        tensors |= {
            f"{layer}.mlp.experts.gate_up_proj{suffix}": both,
            f"{layer}.mlp.experts.down_proj{suffix}": down,
        }
    return tensors


def _split_name(gguf_name: str, layers: str) -> tuple[str, str, str]:
    """Split ``blk.0.attn_q.weight`` into ``("model.layers.0.", "attn_q", "weight")``.

    `layers`: the model's own prefix of a layer's number.
    """
    stem, _, kind = gguf_name.rpartition(".")
    if kind not in ("weight", "bias"):
        stem, kind = gguf_name, "weight"
    layer = ""
    if stem.startswith("blk."):
        _, number, stem = stem.split(".", 2)
        layer = f"{layers}{number}."
    return layer, stem, kind


def _unpermute(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo GGUF's order of a head's rows: it puts rows that rotary embedding pairs beside each other."""
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a model's file. `files.write_json` would mask secrets, but the model must not change."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
