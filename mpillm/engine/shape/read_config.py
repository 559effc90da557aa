"""Read the shape of a model from its `config.json`, without torch and without reading weights.

`model_info` checks the shape for a run.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError
from mpillm.engine.shape.config_fields import ConfigFields, FamilyFields, Raw
from mpillm.engine.shape.dtypes import CHECKPOINT_DTYPES
from mpillm.engine.shape.families.known import FAMILIES, MODEL_TYPES
from mpillm.engine.shape.families.llama import LLAMA
from mpillm.engine.shape.find_model import locate
from mpillm.engine.shape.model_config import ModelConfig
from mpillm.engine.shape.quantization import parse_quantization
from mpillm.engine.shape.read_rope import read_rope
from mpillm.engine.shape.weight_files import has_tensor
from mpillm.files import as_written, excerpt, read_object

_HEAD = "lm_head.weight"
_KINDS = "full_attention", "sliding_attention"  # of layers
# Limits of an untrusted file's use of memory. Experts of all layers: the largest known models have 25,000.
_MAX_LAYERS, _MAX_EXPERTS = 10_000, 100_000


def load_model_config(model_path: str) -> ModelConfig:
    """Return the model in a folder or of a preset. Raises ConfigError if it is missing or cannot run here."""
    source, folder = locate(model_path)
    raw = read_object(source)
    check_architecture(raw, source)
    return with_own_head(parse_model(raw, source), folder)


def with_own_head(model: ModelConfig, folder: Path | None) -> ModelConfig:
    """Return `model` with its own `lm_head` if its folder has one, even with `tie_word_embeddings`.

    transformers ties only a head that is missing, or equal to the embedding.
    """
    if model.tie_word_embeddings and folder is not None and has_tensor(folder, _HEAD):
        return dataclasses.replace(model, tie_word_embeddings=False)
    return model


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
    """Return the architecture in the fields `raw`, which may have only a `model_type`."""
    model_type = str(raw.get("model_type"))
    names = raw.get("architectures") or MODEL_TYPES.get(model_type, model_type)
    return str(names[0] if isinstance(names, list) else names)


def parse_model(raw: Raw, source: Path) -> ModelConfig:
    """Return the model in a `config.json`, `raw`. Raises ConfigError if it cannot run here."""
    with as_written(source, "no config.json of a model"):
        return _parsed(raw, source)


def _parsed(raw: Raw, source: Path) -> ModelConfig:
    name = architecture_of(raw)
    family = FAMILIES.get(name, LLAMA)  # `check_architecture` refuses other names; a draft head is like Llama
    fields = ConfigFields(raw, family.fields, name, source)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    n_layers = fields.integer("num_hidden_layers")
    if n_layers > _MAX_LAYERS:
        count = fields.own_name("num_hidden_layers")
        raise fields.error(f"{count} is {n_layers}; must be {_MAX_LAYERS} at most")
    experts = _experts(fields, family.fields, n_layers)
    more = family.fields.more(fields)
    rope = read_rope(fields.raw, family.fields, source)
    slides = _sliding_layers(fields, n_layers, family.fields)
    windows = tuple(fields.integer("sliding_window") if each else 0 for each in slides)
    quantized = parse_quantization(fields.raw, source, family.fields.quantization)
    sizes = {
        "n_kv_heads": more.get("n_kv_heads") or _kv_heads(fields, heads),
        "head_dim": more.get("head_dim") or _head_dim(fields, hidden, heads),
        "intermediate_size": more.get("intermediate_size")
        or fields.integer(family.fields.expert_size or "intermediate_size"),
    }
    return ModelConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        n_layers=n_layers,
        n_heads=heads,
        max_position_embeddings=fields.integer("max_position_embeddings", 2048),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        tie_word_embeddings=bool(fields.raw.get("tie_word_embeddings", False)),
        dtype=_dtype(fields),
        family=family,
        windows=windows if any(windows) else (),
        local_rope_theta=rope.local_theta,
        score_factor=rope.score_factor,
        quantization=quantized.weights,
        kv_quantization=quantized.kv_cache,
        stored=quantized.stored,
        group=quantized.group,
        norms_choice=bool(fields.raw.get("norm_topk_prob", True)),
        **(experts | more | sizes),
    )


def _kv_heads(fields: ConfigFields, heads: int) -> int:
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.error(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    return kv_heads


def _head_dim(fields: ConfigFields, hidden: int, heads: int) -> int:
    if fields.raw.get("head_dim") is None and hidden % heads:
        size, count = fields.own_name("hidden_size"), fields.own_name("num_attention_heads")
        raise fields.error(f"{size} {hidden} is not a multiple of {count} {heads}, and there is no head_dim")
    head_dim = fields.integer("head_dim", hidden // heads)
    if head_dim % 2:
        raise fields.error(f"head_dim is {head_dim}; must be even, because rotary embeddings rotate pairs")
    return head_dim


def _dtype(fields: ConfigFields) -> str:
    dtype = str(fields.raw.get("dtype") or fields.raw.get("torch_dtype") or "float32")
    if dtype not in CHECKPOINT_DTYPES.values():
        known = ", ".join(CHECKPOINT_DTYPES.values())
        raise fields.error(f"dtype {dtype[:60]} is not one of {known}")
    return dtype


def _experts(fields: ConfigFields, family: FamilyFields, n_layers: int) -> dict[str, Any]:
    """Return the fields of `ModelConfig` about experts; none for a dense model."""
    count = "num_experts" if fields.raw.get("num_local_experts") is None else "num_local_experts"
    has_count = fields.raw.get(count) is not None
    if has_count != (family.expert_size is not None):
        name = fields.own_name(count if has_count else "num_local_experts")
        raise fields.error(f"{fields.architecture} has {'' if has_count else 'no '}{name}")
    if not has_count:
        return {}
    n_experts, n_per_token = fields.integer(count), fields.integer("num_experts_per_tok", 2)
    if (n := n_layers * n_experts) > _MAX_EXPERTS:
        raise fields.error(
            f"{fields.own_name(count)} makes {n} experts in {n_layers} layers; must be {_MAX_EXPERTS} at most"
        )
    if n_per_token > n_experts:
        raise fields.error(f"num_experts_per_tok {n_per_token} of {n_experts} experts")
    return {"n_experts": n_experts, "n_experts_per_token": n_per_token}


def _sliding_layers(fields: ConfigFields, n_layers: int, family: FamilyFields) -> list[bool]:
    """Return for each layer whether its tokens attend to the last `sliding_window` tokens only."""
    raw = fields.raw
    window, uses, types = (raw.get(name) for name in ("sliding_window", "use_sliding_window", "layer_types"))
    has_switch = "use_sliding_window" in family.defaults
    if window is not None and not has_switch and uses is False and family.slides is not None:
        raise fields.error(
            f"use_sliding_window false has no effect in {fields.architecture} beside"
            f" sliding_window {excerpt(window)}; set sliding_window to null"
        )
    if family.slides is None:
        if window is not None and uses is not False:
            raise fields.error(
                f"sliding_window {excerpt(window)} is not supported by the torch core for"
                f" {fields.architecture}"
            )
        window = None
    elif has_switch and not uses:
        window = None
    by_pattern = family.layer_types and not has_switch  # with or without a window
    slides = [
        family.slides is not None and (by_pattern or window is not None) and family.slides(i, raw)
        for i in range(n_layers)
    ]
    if types is not None:
        slides = _by_types(types, slides, fields, has_effect=family.layer_types)
    if any(slides) and window is None:
        switch = ", and use_sliding_window true" if has_switch else ""
        raise fields.error(f"layer_types has {_KINDS[1]}, which needs a sliding_window{switch}")
    return slides


def _by_types(types: Any, slides: list[bool], fields: ConfigFields, *, has_effect: bool) -> list[bool]:
    """Return which layers slide by `layer_types`. Raises ConfigError if that has no effect but differs."""
    n_layers = len(slides)
    if not isinstance(types, list) or len(types) != n_layers or any(kind not in _KINDS for kind in types):
        raise fields.error(
            f"layer_types {excerpt(types)}: must name {' or '.join(_KINDS)} for each of {n_layers} layers"
        )
    named = [kind == _KINDS[1] for kind in types]
    if not has_effect and named != slides:
        raise fields.error(
            f"layer_types {excerpt(types)} has no effect in this architecture, and contradicts"
            " sliding_window; remove layer_types"
        )
    return named
