"""The fields of `config.json`: which ones a family declares, and typed reading with errors that name them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from disagg.errors import ConfigError
from mpillm.files import excerpt

Raw = Mapping[str, Any]  # the fields of `config.json`, with the family's defaults
_MAX = 2**31 - 1
# Allowed values of fields in every family; None: the field may be absent.
_FIXED: Raw = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu", None),
    "partial_rotary_factor": (1, None),
    "per_layer_config": ({}, None),
}
# Two names of the same field, in addition to a family's renames. In transformers, the model's class decides
# which name applies.
_ALIASES = (("num_local_experts", "num_experts"),)
_EMPTY: Raw = MappingProxyType({})


class ConfigFields:
    """A model's fields, under Llama's names."""

    def __init__(self, raw: Raw, family: FamilyFields, architecture: str, source: Path) -> None:
        """Raise ConfigError if fields contradict each other or have values that the family does not support.

        `architecture`: as config.json names it, for messages.
        """
        self.source = source
        self.architecture = architecture
        self._own_names = {name: own for own, name in family.renames.items()}
        self._check_aliases(raw, family)
        self.raw: Raw = {**family.defaults, **{family.renames.get(name, name): raw[name] for name in raw}}
        for name, allowed in {**_FIXED, **family.fixed}.items():
            if self.raw.get(name) not in allowed:
                raise self.error(f"{name} {excerpt(self.raw.get(name))} is not supported by the torch core")

    def error(self, text: str) -> ConfigError:
        return ConfigError(f"{self.source}: {text}")

    def own_name(self, name: str) -> str:
        """Return the family's name of a field."""
        return self._own_names.get(name, name)

    def number(self, name: str, default: float | None = None) -> float:
        """Return a positive, finite number."""
        value = self.raw.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise self.error(f"{self.own_name(name)} is {excerpt(value)}; must be a positive number")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a positive integer."""
        value = self.number(name, default)
        if not isinstance(value, int):
            raise self.error(f"{self.own_name(name)} is {value}; must be an integer")
        if value > _MAX:
            raise self.error(f"{self.own_name(name)} is {excerpt(value)}; must be {_MAX} at most")
        return value

    def _check_aliases(self, raw: Raw, family: FamilyFields) -> None:
        """Refuse different values under names of one field, and Llama's name of a renamed field."""
        for own, name in family.renames.items():
            for field in (name, *(alias for known, alias in _ALIASES if known == name)):
                if raw.get(field) is not None and raw.get(own) is None:
                    raise self.error(f"{field} must be {own} in {self.architecture}")
        for own, name in (*family.renames.items(), *_ALIASES, *family.aliases):
            values = raw.get(own, family.defaults.get(own)), raw.get(name)
            if None not in values and values[0] != values[1]:
                raise self.error(
                    f"{own} {excerpt(values[0])} and {name} {excerpt(values[1])} mean the same"
                    " and differ; remove one of them"
                )


def _no_more(fields: ConfigFields) -> dict[str, Any]:
    return {}


class FamilyFields(NamedTuple):
    """The fields that a family's `config.json` may contain, where they differ from Llama's."""

    defaults: Raw = _EMPTY  # of fields that may be absent, as in transformers
    renames: Mapping[str, str] = MappingProxyType({})  # own name -> Llama's name
    aliases: tuple[tuple[str, str], ...] = ()  # pairs of names of the same field
    fixed: Mapping[str, tuple[Any, ...]] = MappingProxyType({})  # allowed values; None: may be absent
    quantization: tuple[str, ...] = ("awq", "gptq")  # supported methods, in addition to the common ones
    rope: Raw | None = None  # rope_parameters, if config.json has neither these nor rope_scaling
    local_rope: bool = False  # layers with a window have a rotary base of their own
    slides: Callable[[int, Raw], bool] | None = None  # whether a layer has the window `sliding_window`
    layer_types: bool = False  # the field layer_types may name other layers with the window
    expert_size: str | None = None  # the field with the intermediate size of an expert; None: a dense model
    more: Callable[[ConfigFields], dict[str, Any]] = _no_more  # fields of `ModelConfig` that few families set
