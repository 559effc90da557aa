"""Read a model's rotary embeddings from `rope_parameters`, or the older `rope_scaling` and `rope_theta`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

from disagg.errors import ConfigError
from mpillm.engine.shape.config_fields import FamilyFields, Raw
from mpillm.engine.shape.model_config import RopeScaling
from mpillm.files import excerpt

_NEW, _OLD = "rope_parameters", "rope_scaling"  # of transformers 5, and of earlier versions
_FULL, _SLIDING = "full_attention", "sliding_attention"  # kinds of layers
_TYPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # a type's required and optional fields
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (("factor",), ("beta_fast", "beta_slow", "attention_factor")),
}
_LENGTH = "original_max_position_embeddings"  # of types that blend frequencies
_BLENDS = ("llama3", "yarn")


class Rope(NamedTuple):
    """Bases and scaling of rotary embeddings."""

    theta: float
    scaling: RopeScaling
    local_theta: float | None  # of layers with a window, where they have a base of their own
    score_factor: float  # of latent attention's scores


def read_rope(raw: Raw, family: FamilyFields, source: Path) -> Rope:
    """Read `raw`, which has the family's defaults. Raises ConfigError if it cannot run here.

    If both forms are there, transformers drops one of them, with its base. So they must be equal.
    """
    for name in (_NEW, _OLD):
        if not isinstance(raw.get(name) or {}, dict):
            raise ConfigError(f"{source}: {name} is {excerpt(raw[name])}; must be an object")
    new, old = raw.get(_NEW), raw.get(_OLD)
    if new is None and family.rope is not None:
        new = family.rope
    read = _by_kind if family.local_rope else _flat
    rope = read(raw, new or {}, old, source)
    if raw.get(_NEW) and old and rope != read(raw, new or {}, None, source):
        raise ConfigError(
            f"{source}: {_OLD} and {_NEW} mean the same and differ; move the values of {_OLD} into {_NEW},"
            f" and remove {_OLD}"
        )
    return rope


def _flat(raw: Raw, new: Raw, old: Raw | None, source: Path) -> Rope:
    rope = old or new
    for name, value in rope.items():
        if isinstance(value, dict):
            raise ConfigError(
                f"{source}: {_NEW} has {excerpt(name)} with values of its own, which this model's layers"
                " do not have; must be one for all layers"
            )
    if (partial := rope.get("partial_rotary_factor", 1)) != 1:
        raise ConfigError(
            f"{source}: partial_rotary_factor {excerpt(partial)} is not supported by the torch core"
        )
    length = raw.get(_LENGTH)  # takes precedence over the object's
    scaling = _scaling(rope if length is None else {**rope, _LENGTH: length}, raw, source)
    score_factor = 1.0
    if scaling.kind != "default" and (scale := rope.get("mscale_all_dim")):
        score_factor = _yarn_scale(scaling.factor, scale) ** 2
    return Rope(_theta(rope, "rope_theta", raw, source), scaling, None, score_factor)


def _by_kind(raw: Raw, new: Raw, old: Raw | None, source: Path) -> Rope:
    """Read `rope_parameters` for each kind of layer; `rope_scaling` is for layers without a window."""
    if unknown := [name for name in new if name not in (_FULL, _SLIDING)]:
        raise ConfigError(
            f"{source}: {_NEW} has {excerpt(unknown[0])}, which has no effect in this model; must be"
            f" {_FULL} and {_SLIDING}, with an object each"
        )
    if old and "type" in old and "rope_type" not in old:
        raise ConfigError(
            f"{source}: {_OLD} has type {excerpt(old['type'])}, which has no effect in this model; must be"
            " rope_type"
        )
    full, sliding = ({**(new.get(kind) or {})} for kind in (_FULL, _SLIDING))
    full |= old or {}
    for rope in (full, sliding):
        if rope.get("partial_rotary_factor", 1) != 1:
            raise ConfigError(f"{source}: partial_rotary_factor is not supported by the torch core")
    if (kind := _scaling(sliding, raw, source).kind) != "default":
        raise ConfigError(f"{source}: rope type {kind} of {_SLIDING} is not supported by the torch core")
    return Rope(
        _theta(full, "rope_theta", raw, source),
        _scaling(full, raw, source),
        _theta(sliding, "rope_local_base_freq", raw, source),
        1.0,
    )


def _theta(rope: Raw, name: str, raw: Raw, source: Path) -> float:
    """Return the base in `rope`, or else the field `name` of `raw`."""
    value = rope["rope_theta"] if "rope_theta" in rope else raw.get(name, 10_000.0)
    if not is_number(value) or not 0 < value < math.inf:
        raise ConfigError(f"{source}: rope_theta is {excerpt(value)}; must be a positive number")
    return float(value)


def _scaling(rope: Raw, raw: Raw, source: Path) -> RopeScaling:
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    if kind not in _TYPES:
        raise ConfigError(
            f"{source}: rope type {kind[:60]} is not supported by the torch core;"
            f" supported: {', '.join(_TYPES)}"
        )
    needed, others = _TYPES[kind]
    if kind in _BLENDS:
        needed = (*needed, _LENGTH)
        rope = {_LENGTH: raw.get("max_position_embeddings", 2048), **rope}
    missing = [name for name in needed if not is_number(rope.get(name))]
    if missing:
        raise ConfigError(f"{source}: rope type {kind} needs {', '.join(missing)}")
    values: dict[str, Any] = {name: rope[name] for name in (*needed, *others) if rope.get(name) is not None}
    for name, value in values.items():
        if not is_number(value) or not 0 < value < math.inf:
            raise ConfigError(f"{source}: {name} is {excerpt(value)}; must be a positive number")
    if kind != "yarn":
        return RopeScaling(kind, **values)
    for name in ("mscale", "mscale_all_dim"):
        if not is_number(rope.get(name) or 0.0):
            raise ConfigError(f"{source}: {name} is {excerpt(rope[name])}; must be a number")
    if "attention_factor" not in values:
        # As in the paper; DeepSeek's models divide it by another factor.
        factor, more, all_ = values["factor"], rope.get("mscale"), rope.get("mscale_all_dim")
        values["attention_factor"] = _yarn_scale(factor, 1)
        if more and all_:
            values["attention_factor"] = _yarn_scale(factor, more) / _yarn_scale(factor, all_)
    return RopeScaling(kind, **values, truncate=bool(rope.get("truncate", True)))


def _yarn_scale(factor: float, by: float) -> float:
    return 0.1 * by * math.log(factor) + 1 if factor > 1 else 1.0


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
