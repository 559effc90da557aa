"""Read the shape of a model from its `config.json`, without torch and without reading weights.

A model is a Hugging Face folder (`config.json`, `*.safetensors`, `generation_config.json`) or the name of a
preset: a `config.json` that comes with mpillm, for seeded random weights. `model_info` checks it for a run.
"""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError, about, nearest
from mpillm.data.other_weights import other_weights
from mpillm.engine.shape.dtypes import CHECKPOINT_DTYPES
from mpillm.engine.shape.families import FAMILIES, MODEL_TYPES, Family, Latent, Raw
from mpillm.engine.shape.model_config import ModelConfig
from mpillm.engine.shape.quantization import parse_quantization
from mpillm.engine.shape.read_rope import read_rope
from mpillm.engine.shape.weight_files import has_tensor
from mpillm.files import as_written, check_files, excerpt, is_there, read_object

PRESETS = Path(__file__).parent / "presets"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # of a model of the Hugging Face hub
# Fields of config.json that may have these values only, None where they may be left out.
_FIXED: Raw = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu", None),
    "partial_rotary_factor": (1, None),
    "per_layer_config": ({}, None),
}
_HEAD = "lm_head.weight"
# Fields with one meaning, besides those that a family renames. In transformers the class decides which wins.
_ONE_MEANING = (("num_local_experts", "num_experts"),)
_KINDS = "full_attention", "sliding_attention"  # of layers
# A stranger's file must not ask for all memory. Experts: of all layers; the largest known have some 25,000.
_MOST, _MOST_LAYERS, _MOST_EXPERTS = 2**31 - 1, 10_000, 100_000


def load_model_config(model_path: str) -> ModelConfig:
    """Return the model in a folder or of a preset. Raises ConfigError if it is missing or cannot run here."""
    source, folder = locate(model_path)
    raw = read_object(source)
    check_architecture(raw, source)
    return with_own_head(parse_model(raw, source), folder)


def with_own_head(model: ModelConfig, folder: Path | None) -> ModelConfig:
    """Return `model` with a head of its own if its folder has one, whatever `tie_word_embeddings` says.

    transformers ties only a head that is missing, or equal to the embedding.
    """
    if model.tie_word_embeddings and folder is not None and has_tensor(folder, _HEAD):
        return dataclasses.replace(model, tie_word_embeddings=False)
    return model


def preset_json(name: str) -> dict[str, Any]:
    """Return a preset's `config.json`, parsed."""
    return read_object(PRESETS / f"{name}.json")


def presets() -> list[str]:
    return sorted(file.stem for file in PRESETS.glob("*.json"))


def is_preset(name: str) -> bool:
    """Return whether a preset has this name."""
    return "/" not in name and (PRESETS / f"{name}.json").is_file()


@about("model_path")
def locate(model_path: str) -> tuple[Path, Path | None]:
    """Return config.json and the folder (None for a preset). Raises ConfigError if there is neither."""
    folder = model_folder(model_path)
    if folder is None:
        return PRESETS / f"{model_path}.json", None
    check_files(folder)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"--model_path {model_path}: no model there: the folder has no config.json{other_weights(folder)}"
        )
    return folder / "config.json", folder


@about("model_path")
def model_folder(model_path: str) -> Path | None:
    """Return the folder that --model_path names; None for a preset, unless a folder has its name.

    Raises ConfigError if there is neither.
    """
    folder = Path(model_path)
    if folder.is_dir():
        return folder
    if is_preset(model_path):
        return None
    if folder.suffix == ".gguf" and is_there(folder):
        raise ConfigError(
            f"--model_path {model_path}: a GGUF file, not a folder; convert it: `python -m mpillm fetch-model"
            f" {shlex.quote(model_path)}`, which prints the folder for --model_path"
        )
    if is_there(folder):
        raise ConfigError(f"--model_path {model_path}: a file, not a folder with config.json and weights")
    if _HUB_ID.fullmatch(model_path):
        where = f"models/{folder.name}"
        raise ConfigError(
            f"--model_path {model_path}: no such folder; a model of the Hugging Face hub must be"
            f" fetched first: `hf download {model_path} --local-dir {where}` (pip install huggingface_hub),"
            f" then --model_path {where}"
        )
    known = presets()
    raise ConfigError(
        f"--model_path {model_path}: no such folder, and no such preset{nearest(model_path, known)};"
        f" presets: {', '.join(known)}"
    )


def check_architecture(raw: dict[str, Any], source: Path) -> None:
    """Raise ConfigError if the torch core does not support the architecture in `config.json`'s `raw`."""
    name, model_type = architecture_of(raw), raw.get("model_type")
    if name not in FAMILIES:
        which = f"architecture {name[:60]}"
        if not raw.get("architectures"):
            which = f"there is no architectures, and model_type {excerpt(model_type)}"
        raise ConfigError(
            f"{source}: {which} is not supported by the torch core; supported: {', '.join(FAMILIES)}"
        )
    if MODEL_TYPES.get(str(model_type), name) != name:
        raise ConfigError(
            f"{source}: architectures {name} and model_type {model_type} contradict each other;"
            f" model_type {model_type} is {MODEL_TYPES[str(model_type)]}"
        )


def architecture_of(raw: Raw) -> str:
    """Return the name of the architecture in `config.json`'s `raw`, or that of its `model_type`."""
    model_type = str(raw.get("model_type"))
    names = raw.get("architectures") or MODEL_TYPES.get(model_type, model_type)
    return str(names[0] if isinstance(names, list) else names)


def parse_model(raw: Raw, source: Path) -> ModelConfig:
    """Return the model in a `config.json`, `raw`. Raises ConfigError if it cannot run here."""
    with as_written(source, "no config.json of a model"):
        return _parsed(raw, source)


def _parsed(raw: Raw, source: Path) -> ModelConfig:
    def number(name: str, default: float | None = None, where: Raw | None = None) -> float:
        value = (raw if where is None else where).get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ConfigError(
                f"{source}: {theirs.get(name, name)} is {excerpt(value)}; must be a positive number"
            )
        return value

    def integer(name: str, default: int | None = None) -> int:
        value = number(name, default)
        if not isinstance(value, int):
            raise ConfigError(f"{source}: {theirs.get(name, name)} is {value}; must be an integer")
        if value > _MOST:
            raise ConfigError(
                f"{source}: {theirs.get(name, name)} is {excerpt(value)}; must be {_MOST} at most"
            )
        return value

    name = architecture_of(raw)
    family = FAMILIES.get(name, Family())  # which the caller has checked
    theirs = {ours: field for field, ours in family.renames.items()}
    _check_pairs(raw, family, source)
    raw = {**family.defaults, **{family.renames.get(field, field): raw[field] for field in raw}}
    for field, allowed in {**_FIXED, **family.fixed}.items():
        if raw.get(field) not in allowed:
            raise ConfigError(
                f"{source}: {field} {excerpt(raw.get(field))} is not supported by the torch core"
            )
    hidden, heads = integer("hidden_size"), integer("num_attention_heads")
    kv_heads = 1 if family.latent else integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(
            f"{source}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    if raw.get("head_dim") is None and hidden % heads and not family.latent:
        raise ConfigError(
            f"{source}: hidden_size {hidden} is not a multiple of num_attention_heads {heads},"
            " and there is no head_dim"
        )
    rope = read_rope(raw, family, source)
    latent = _latent(raw, integer, source, rope.score_factor) if family.latent else None
    head_dim = integer("head_dim", hidden // heads) if latent is None else latent.head_dim
    if head_dim % 2:
        raise ConfigError(f"{source}: head_dim {head_dim} is odd; rotary embeddings turn pairs")
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
    if dtype not in CHECKPOINT_DTYPES.values():
        known = ", ".join(CHECKPOINT_DTYPES.values())
        raise ConfigError(f"{source}: dtype {dtype[:60]} is not one of {known}")
    n_layers = integer("num_hidden_layers")
    if n_layers > _MOST_LAYERS:
        raise ConfigError(f"{source}: num_hidden_layers is {n_layers}; must be {_MOST_LAYERS} at most")
    slides = _sliding_layers(raw, n_layers, family, source)
    quantized = parse_quantization(raw, source, family)
    count = "num_experts" if raw.get("num_local_experts") is None else "num_local_experts"
    has_count = raw.get(count) is not None
    if has_count != (family.experts is not None):
        said = f"has {theirs.get(count, count)}" if has_count else "has no num_local_experts"
        raise ConfigError(f"{source}: {name} {said}")
    experts: dict[str, Any] = {}
    if has_count:
        experts = {
            "n_experts": integer(count),
            "n_experts_per_token": integer("num_experts_per_tok", 2),
        }
        if (n := n_layers * experts["n_experts"]) > _MOST_EXPERTS:
            raise ConfigError(
                f"{source}: {theirs.get(count, count)} makes {n} experts in {n_layers} layers;"
                f" must be {_MOST_EXPERTS} at most"
            )
        if experts["n_experts_per_token"] > experts["n_experts"]:
            raise ConfigError(
                f"{source}: num_experts_per_tok {experts['n_experts_per_token']}"
                f" of {experts['n_experts']} experts"
            )
    scaled = "query_pre_attn_scalar" in family.defaults
    grouped: dict[str, Any] = {}
    if family.experts is not None and family.experts.grouped:
        grouped = {
            "groups": (integer("n_group"), integer("topk_group")),
            "routed_factor": float(number("routed_scaling_factor")),
            "n_dense_layers": integer("first_k_dense_replace") if raw["first_k_dense_replace"] else 0,
            "dense_size": integer("intermediate_size"),
            "shared_size": integer("n_shared_experts") * integer("moe_intermediate_size"),
        }
        n, chosen = grouped["groups"]
        in_groups = experts["n_experts"] // n * chosen
        if experts["n_experts"] % n or chosen > n or experts["n_experts_per_token"] > in_groups:
            raise ConfigError(
                f"{source}: {experts['n_experts']} experts in n_group {n}, of which topk_group {chosen}:"
                f" must be equal groups with {experts['n_experts_per_token']} experts to choose"
            )
    return ModelConfig(
        vocab_size=integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=integer(
            family.experts.inner_size if family.experts is not None else "intermediate_size",
            None if family.is_gated else 4 * hidden,
        ),
        n_layers=n_layers,
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=integer("max_position_embeddings", 2048),
        rms_norm_eps=number("rms_norm_eps", 1e-6),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        dtype=dtype,
        family=family,
        windows=tuple(integer("sliding_window") if slides[i] else 0 for i in range(n_layers))
        if any(slides)
        else (),
        local_rope_theta=rope.local_theta,
        query_scalar=float(number("query_pre_attn_scalar")) if scaled else None,
        quantization=quantized.weights,
        kv_quantization=quantized.kv_cache,
        stored=quantized.stored,
        group=quantized.group,
        norms_choice=bool(raw.get("norm_topk_prob", True)),
        latent=latent,
        **experts,
        **grouped,
    )


def _check_pairs(raw: Raw, family: Family, source: Path) -> None:
    """Refuse fields of one meaning that differ, and Llama's name of a field in another family."""
    for name, other in family.renames.items():
        for field in (other, *(alias for known, alias in _ONE_MEANING if known == other)):
            if raw.get(field) is not None and raw.get(name) is None:
                raise ConfigError(f"{source}: {field} must be {name} in {architecture_of(raw)}")
    pairs = (*family.renames.items(), *_ONE_MEANING)
    for name, other in (*pairs, ("qk_rope_head_dim", "head_dim")) if family.latent else pairs:
        values = raw.get(name, family.defaults.get(name)), raw.get(other)
        if None not in values and values[0] != values[1]:
            raise ConfigError(
                f"{source}: {name} {excerpt(values[0])} and {other} {excerpt(values[1])} mean the same"
                " and differ; remove one of them"
            )


def _latent(raw: Raw, integer: Callable[[str], int], source: Path, score_factor: float) -> Latent:
    sizes = {name: integer(name) for name in Latent._fields[1:-1]}
    for name in ("kv_lora_rank", "qk_rope_head_dim"):
        if sizes[name] % 2:
            raise ConfigError(f"{source}: {name} {sizes[name]} is odd; rotary embeddings turn pairs")
    rank = integer("q_lora_rank") if raw["q_lora_rank"] is not None else 0
    return Latent(rank, **sizes, score_factor=score_factor)


def _sliding_layers(raw: Raw, n_layers: int, family: Family, source: Path) -> list[bool]:
    """Return for each layer whether its tokens see the last `sliding_window` only."""
    window, uses, types = (raw.get(name) for name in ("sliding_window", "use_sliding_window", "layer_types"))
    has_switch = "use_sliding_window" in family.defaults
    if window is not None and not has_switch and uses is False and family.slides is not None:
        raise ConfigError(
            f"{source}: use_sliding_window false has no effect in {architecture_of(raw)} beside"
            f" sliding_window {excerpt(window)}; set sliding_window to null"
        )
    if family.slides is None:
        if window is not None and uses is not False:
            raise ConfigError(
                f"{source}: sliding_window {excerpt(window)} is not supported by the torch core for"
                f" {architecture_of(raw)}"
            )
        window = None
    elif has_switch and not uses:
        window = None
    by_pattern = family.layer_types and not has_switch  # whether there is a window or not
    slides = [
        family.slides is not None and (by_pattern or window is not None) and family.slides(i, raw)
        for i in range(n_layers)
    ]
    if types is not None:
        slides = _of_types(types, slides, family, source)
    if any(slides) and window is None:
        switch = ", and use_sliding_window true" if has_switch else ""
        raise ConfigError(f"{source}: layer_types has {_KINDS[1]}, which needs a sliding_window{switch}")
    return slides


def _of_types(types: Any, slides: list[bool], family: Family, source: Path) -> list[bool]:
    """Return which layers slide by `layer_types`; ConfigError where transformers would not read it."""
    n_layers = len(slides)
    if not isinstance(types, list) or len(types) != n_layers or any(kind not in _KINDS for kind in types):
        raise ConfigError(
            f"{source}: layer_types {excerpt(types)}: must name {' or '.join(_KINDS)}"
            f" for each of {n_layers} layers"
        )
    named = [kind == _KINDS[1] for kind in types]
    if not family.layer_types and named != slides:
        raise ConfigError(
            f"{source}: layer_types {excerpt(types)} has no effect in this architecture, and contradicts"
            " sliding_window; remove layer_types"
        )
    return named
