"""Flags: environment variables that override them, their other names, and their values on mpillm's cores."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from disagg.errors import ConfigError, nearest
from mpillm.options.field import AutoConfStrategy, Field
from mpillm.options.fields import AllFields
from mpillm.options.fields.runtime_flags import OTHER_NAMES, RUNTIME_FLAGS
from mpillm.options.sources import OptionValue, Source, from_environment

OVERLAYS: dict[Field, str] = {
    AllFields.trtllm_checkpoint_flags: "TRTLLM_CHECKPOINT_FLAGS",
    AllFields.trtllm_build_flags: "TRTLLM_BUILD_FLAGS",
    AllFields.trtllm_runtime_flags: "TRTLLM_RUNTIME_FLAGS",
}
"""Environment variables that override flags, key by key, of a command and of the class that owns them."""


def environment_overlays(values: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
    """Return the flags that the environment overrides, by name. `values`: of all fields, by name."""
    return {
        field.name: override.over(values[field.name], AutoConfStrategy.DictUpdate)
        for field, variable in OVERLAYS.items()
        if (override := from_environment(field, variable, os.environ)) is not None
    }


def renamed(flags: OptionValue, flags_name: str) -> OptionValue:
    """Return flags by their first names, as in `RUNTIME_FLAGS`.

    Raises ConfigError for a wrong text, or if two names of a flag have different values from one source.
    """
    values: dict[str, OptionValue] = {}
    written: dict[str, str] = {}
    for name, flag in flags.all_keys().items():
        value = flag.value
        first, meanings = OTHER_NAMES.get(name, (name, {}))
        if meanings and str(value) not in meanings:
            raise ConfigError(
                f"{flag.where}: {flags_name} {name} {value}: not one of"
                f" {', '.join(meanings)}{nearest(str(value), meanings)}"
            )
        flag = flag._replace(value=meanings[str(value)] if meanings else value)
        other = values.get(first)
        if other is not None and other.source is flag.source and other.value != flag.value:
            raise ConfigError(
                f"{flag.where}: {flags_name} {name} {value}, but {written[first]} ({other.where})"
            )
        if other is None or _precedence(other) < _precedence(flag):
            values[first], written[first] = flag, f"{name} {value}"
    return flags._replace(value={name: flag.value for name, flag in values.items()}, keys=values)


def _precedence(flag: OptionValue) -> tuple[bool, Source]:
    """Return the precedence of a key of flags: the environment overrides all other sources."""
    return flag.source is Source.ENVIRONMENT, flag.source


LIMITS = (AllFields.max_batch_size.name, AllFields.max_num_tokens.name)
"""The limits that an engine is built for. A run may set lower limits."""


def limits_of_engine(run: Mapping[str, Any], built: Mapping[str, Any]) -> dict[str, Any]:
    """Return the known limits of the engine that `run` does not set."""
    return {name: built[name] for name in LIMITS if run.get(name) is None and built.get(name) is not None}


def check_limits(run: Mapping[str, Any], built: Mapping[str, Any], of: str) -> None:
    """Raise ConfigError if a limit of `run` exceeds the engine's. `of`: the option that sets the engine's."""
    for name in LIMITS:
        limit, value = built.get(name), run.get(name)
        if limit is not None and value is not None and value > limit:
            raise ConfigError(
                f"trtllm_runtime_flags {name} is {value}, more than the {limit} of {of}",
                about=["trtllm_runtime_flags", name],
            )


def check_values(core_type: str, flags: OptionValue) -> None:
    """Raise ConfigError for a value that a flag cannot have, or that mpillm's core does not support.

    `unused_options` reports flags without effect.
    """
    for name, flag in flags.all_keys().items():
        if name not in RUNTIME_FLAGS or flag.value is None:
            continue
        where = f"{flag.where}: trtllm_runtime_flags {name}"
        checked = RUNTIME_FLAGS[name].check(flag.value, where)
        if name == "exclude_input_from_output" and not checked:
            raise ConfigError(
                f"{where} {flag.value}: the {core_type} core answers without the prompt, as LoadGen requires"
            )
