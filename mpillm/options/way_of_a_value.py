"""The way of an option's value: what each source says, and which rules changed it. For `plan --explain`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from disagg.errors import ConfigError, nearest
from launch.masking import masked_value
from mpillm.options.fields import BY_NAME, SETS
from mpillm.options.found import Found, Level
from mpillm.options.mitten import Configuration
from mpillm.options.parsers import Secret
from mpillm.options.rules import Trace, resolve
from mpillm.options.run_config import RunConfig


def way_of(name: str, config: RunConfig, layers: Configuration) -> dict[str, Any]:
    """Return the way of the option `name`, as JSON has it.

    `layers`: what `config` was read from, all but the disaggregation YAML. Raises ConfigError for no option.
    """
    typed = name.lstrip("-").replace("-", "_")
    if typed not in BY_NAME:
        raise ConfigError(f"--explain {name}: there is no such option{nearest(typed, BY_NAME)}")
    field = BY_NAME[typed]
    said = [_entry(found) for found in reversed(layers.stacked(field))]
    stated = config.stated[field.name]
    if stated.origin.level is Level.YAML:  # under the user's sources, over all others
        said.insert(0, _entry(stated))
    trace: Trace = []
    resolve(config.stated, trace)
    rules = [
        {"rule": rule.name, "source": rule.origin, **_entry(found)}
        for rule, changed, found in trace
        if changed == field.name
    ]
    sections = {section: _entry(one.found[field.name]) for section, one in config.sections.items()}
    return {
        "option": field.name,
        **_entry(config.found[field.name]),
        "stated": said,
        "read_as": _entry(stated),
        "rules": rules,
        "sections": sections if len({repr(one) for one in sections.values()}) > 1 else {},
        "set_by": [setting.name for setting, others in SETS.items() if field in others],
    }


def told(way: dict[str, Any]) -> str:
    """Return the way of a value for a person."""
    lines = [f"{way['option']} is {_text(way)}, from {way['from']}"]
    for section, one in way["sections"].items():
        lines.append(f"  in {section}: {_text(one)}, from {one['from']}")
    lines += [
        "",
        "stated, the highest source first" if way["stated"] else "stated nowhere, and without a default",
    ]
    lines += _columns([(_text(one), one["from"]) for one in way["stated"]])
    if way["stated"] and way["read_as"] != way["stated"][0]:
        lines.append(f"  read as {_text(way['read_as'])}, from {way['read_as']['from']}")
    lines += ["", "rules that changed it" if way["rules"] else "no rule changed it"]
    for one in way["rules"]:
        lines += [f"  {one['rule']} ({one['source']})", f"    {_text(one)}, from {one['from']}"]
    if way["set_by"]:
        lines += ["", f"options that may set it: {', '.join(way['set_by'])}"]
    return "\n".join(lines)


def _entry(found: Found) -> dict[str, Any]:
    value = str(found.value) if isinstance(found.value, Secret) else masked_value(found.value)
    entry = {"value": value, "from": found.origin.where}
    if found.keys:
        entry["keys"] = {key: origin.where for key, origin in found.keys.items()}
    return entry


def _text(entry: dict[str, Any]) -> str:
    value, keys = entry["value"], entry.get("keys", {})
    if isinstance(value, dict):
        return (
            ", ".join(f"{key}:{one}{f' ({keys[key]})' if key in keys else ''}" for key, one in value.items())
            or "empty"
        )
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return "not set" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _columns(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max((len(value) for value, _ in rows), default=0)
    return [f"  {value:<{width}}  {where}" for value, where in rows]
