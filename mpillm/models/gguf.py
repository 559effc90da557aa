"""A GGUF file as a Hugging Face folder: Llama architecture, byte-level BPE tokenizer, weights in fp32.

`transformers` reads GGUF too, but it needs PyTorch and accelerate, takes 20 seconds, and drops the
tokenizer's rule for splitting text. This takes 5 seconds; a test compares its weights with those of
`transformers`, bit by bit.
"""

from __future__ import annotations

import json
import mmap
import shutil
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError
from disagg.text_file import check_file
from mpillm.files import panics_named

FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
NEEDS = ("gguf", "safetensors", "tokenizers")  # the modules of the `models` extra that the conversion imports

_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3  # GGUF's token type of special tokens
_ITEM_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # by GGUF's types
_STRING, _ARRAY = 8, 9
_RESERVE = 64 << 20  # bytes of disk for the files beside the weights


def convert(source: Path, target: Path) -> None:
    """Write `FILES` into the folder `target`; ConfigError says what in the GGUF file cannot be converted."""
    import gguf

    check_file(source)
    try:
        size = _check_counts(source)
        reader = gguf.GGUFReader(source)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        if sum(int(tensor.n_bytes) for tensor in reader.tensors) > size:
            raise ValueError("tensors that overlap")
    except (ValueError, KeyError, IndexError) as error:
        raise ConfigError(f"{source} is not a GGUF file that we can read: {error}") from error
    try:
        config = _config(
            source, metadata, tied="output.weight" not in {tensor.name for tensor in reader.tensors}
        )
        _write_json(target / "config.json", config)
        _write_json(
            target / "generation_config.json",
            {key: config[key] for key in config if key.endswith("_token_id")},
        )
        _write_tokenizer(source, metadata, target)
    except KeyError as error:
        raise ConfigError(f"{source} has no {error.args[0]}, which the conversion needs") from error
    except ConfigError:
        raise
    except (ArithmeticError, AttributeError, IndexError, TypeError, ValueError) as error:
        raise ConfigError(f"{source} is damaged: {type(error).__name__}: {error}") from error
    try:
        _write_weights(source, reader.tensors, config, target / "model.safetensors")
    except ConfigError:
        raise
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ConfigError(f"{source} has weights that are damaged: {error}") from error
    # safetensors makes its file readable by the owner only.
    shutil.copymode(target / "config.json", target / "model.safetensors")


def _check_counts(source: Path) -> int:
    """Walk over the header and return the file's size. Raises ValueError for a count beyond the file's end.

    The package gguf believes each count, and goes on for ever behind the end.
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
            skip(8 * number(4) + 4 + 8)  # dimensions, type, place
        return len(data)


def _config(source: Path, metadata: dict[str, Any], tied: bool) -> dict[str, Any]:
    if (architecture := metadata.get("general.architecture")) != "llama":
        raise ConfigError(f"{source} has architecture {architecture!r}; only 'llama' can be converted")
    if unknown := [key for key in metadata if key.startswith(("llama.rope.scaling", "llama.expert"))]:
        raise ConfigError(f"{source} has {', '.join(unknown)}, which cannot be converted")
    heads, hidden = metadata["llama.attention.head_count"], metadata["llama.embedding_length"]
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", heads),
        "head_dim": metadata.get("llama.rope.dimension_count", hidden // heads),
        "hidden_act": "silu",
        "max_position_embeddings": metadata["llama.context_length"],
        # The shortest decimal that gives the same float32: 1e-05, not 9.999999747378752e-06.
        "rms_norm_eps": float(str(np.float32(metadata["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": metadata.get("llama.rope.freq_base", 10000.0),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
    }
    for name, key in {"bos": "bos", "eos": "eos", "pad": "padding"}.items():
        if (token := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[f"{name}_token_id"] = token
    return config


def _write_tokenizer(source: Path, metadata: dict[str, Any], target: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    splitters = {
        "gpt-2": byte_level,
        # Every digit is a token, as in SmolLM's own tokenizer.json. transformers leaves this out: there
        # "\n\n1" starts with two tokens for the line ends, but the model was trained with one.
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level]),
    }
    kind, splitter = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or splitter not in splitters or metadata.get("tokenizer.ggml.add_bos_token"):
        raise ConfigError(
            f"{source} has a tokenizer that cannot be converted: {kind!r}, {splitter!r}; "
            f"known: 'gpt2', {sorted(splitters)}"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [
        (left, right)
        for left, _, right in (merge.partition(" ") for merge in metadata["tokenizer.ggml.merges"])
    ]
    with panics_named(f"{source}: its tokenizer makes no sense"):
        model = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = splitters[splitter]
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, type_ in zip(tokens, types, strict=True)
            if type_ == _CONTROL_TOKEN
        ]
    )
    tokenizer.save(str(target / "tokenizer.json"))

    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }
    for name, key in {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}.items():
        if (token := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[f"{name}_token"] = tokens[token]
    if (template := metadata.get("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    _write_json(target / "tokenizer_config.json", config)


def _write_weights(source: Path, tensors: list[Any], config: dict[str, Any], target: Path) -> None:
    import gguf
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    size = 4 * sum(int(tensor.n_elements) for tensor in tensors)
    if (free := shutil.disk_usage(target.parent).free) < size + _RESERVE:
        needed = f"the weights need {(size + _RESERVE) >> 20} MB"
        raise ConfigError(f"{needed} and the disk of {target.parent} has {free >> 20} MB free")
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights: dict[str, NDArray[np.float32]] = {}
    for tensor in tensors:
        layer, name = _tensor_name(source, tensor.name)
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if name in heads:
            values = _unpermute(values, heads[name])
        weights[f"{layer}{_TENSORS[name]}.weight"] = np.ascontiguousarray(values)
    try:
        save_file(weights, target, metadata={"format": "pt"})
    except SafetensorError as error:
        raise ConfigError(f"cannot write {target}: {error}") from error


def _tensor_name(source: Path, gguf_name: str) -> tuple[str, str]:
    """Split ``blk.0.attn_q.weight`` into ``("model.layers.0.", "attn_q")``."""
    stem, _, suffix = gguf_name.rpartition(".")
    layer = ""
    if stem.startswith("blk."):
        _, number, stem = stem.split(".", 2)
        layer = f"model.layers.{number}."
    if stem not in _TENSORS or suffix != "weight":
        raise ConfigError(f"{source} has a tensor {gguf_name!r}, which a llama model does not have")
    return layer, stem


def _unpermute(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo GGUF's order of a head's rows, which interleaves the two halves that rotary embedding pairs."""
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
