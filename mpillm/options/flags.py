"""Flags: the environment that overrides them, their other names, and their values on our cores."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from disagg.errors import ConfigError, nearest
from mpillm.options.field import AutoConfStrategy, Field
from mpillm.options.fields import AllFields
from mpillm.options.fields.runtime_flags import OTHER_NAMES, RUNTIME_FLAGS
from mpillm.options.found import Found, Level, Origin
from mpillm.options.mitten import environment, from_environment

OVERLAYS: dict[Field, str] = {
    AllFields.trtllm_checkpoint_flags: "TRTLLM_CHECKPOINT_FLAGS",
    AllFields.trtllm_build_flags: "TRTLLM_BUILD_FLAGS",
    AllFields.trtllm_runtime_flags: "TRTLLM_RUNTIME_FLAGS",
}
"""Environment variables that override flags, key by key, of a command and of the class that owns them."""


def laid_over(found: Mapping[str, Found]) -> dict[str, Found]:
    """Return the flags that the environment overrides, by name. `found`: every field, by name."""
    return {
        field.name: said.over(found[field.name], AutoConfStrategy.DictUpdate)
        for field, variable in OVERLAYS.items()
        if (said := from_environment(field, variable, os.environ)) is not None
    }


def overlaid(field: Field, flags: Mapping[str, Any] | None) -> dict[str, Any]:
    """`flags`, overridden by the environment's: for the class that owns them, wherever they came from.

    A command's values, which include that already, come with an empty environment.
    """
    said = from_environment(field, OVERLAYS[field], environment())
    return {**(flags or {}), **(said.value if said else {})}


def renamed(flags: Found, flags_name: str) -> Found:
    """Return flags by their first names.

    Raises ConfigError for a wrong text, or two names that differ in like sources.
    """
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    written: dict[str, str] = {}
    for name, value in flags.value.items():
        origin = flags.key_origins()[name]
        first, meanings = OTHER_NAMES.get(name, (name, {}))
        if meanings and str(value) not in meanings:
            raise ConfigError(
                f"{origin.where}: {flags_name} {name} {value}: not one of"
                f" {', '.join(meanings)}{nearest(str(value), meanings)}"
            )
        meant = meanings[str(value)] if meanings else value
        if first in values and origins[first].level is origin.level and values[first] != meant:
            raise ConfigError(
                f"{origin.where}: {flags_name} {name} {value}, but {written[first]} ({origins[first].where})"
            )
        if first not in values or _rank(origins[first]) < _rank(origin):
            values[first], origins[first], written[first] = meant, origin, f"{name} {value}"
    return Found(values, flags.origin, origins)


def _rank(origin: Origin) -> tuple[bool, Level]:
    """Of the keys of flags: the environment is laid over the others."""
    return origin.level is Level.ENVIRONMENT, origin.level


LIMITS = (AllFields.max_batch_size.name, AllFields.max_num_tokens.name)
"""What an engine is built for, and a run may use less of."""


def limits_of_engine(run: Mapping[str, Any], built: Mapping[str, Any]) -> dict[str, Any]:
    """Return the limits that `run` does not state: those of the engine, if they are known."""
    return {name: built[name] for name in LIMITS if run.get(name) is None and built.get(name) is not None}


def check_limits(run: Mapping[str, Any], built: Mapping[str, Any], of: str) -> None:
    """Raise ConfigError if a limit of `run` is more than the engine's, which is that `of` an option."""
    for name in LIMITS:
        limit, wanted = built.get(name), run.get(name)
        if limit is not None and wanted is not None and wanted > limit:
            raise ConfigError(
                f"trtllm_runtime_flags {name} is {wanted}, more than the {limit} of {of}",
                about=["trtllm_runtime_flags", name],
            )


def check_values(core_type: str, flags: Found) -> None:
    """Raise ConfigError for a value that a flag can't have, or that our core of this type can't honour.

    `idle` has flags without effect.
    """
    for name, value in flags.value.items():
        if name not in RUNTIME_FLAGS or value is None:
            continue
        where = f"{flags.key_origins()[name].where}: trtllm_runtime_flags {name}"
        checked = RUNTIME_FLAGS[name].check(value, where)
        if name == "exclude_input_from_output" and not checked:
            raise ConfigError(
                f"{where} {value}: the {core_type} core answers without the prompt, as LoadGen wants it"
            )
